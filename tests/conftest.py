"""Shared by all tests: offline, deterministic, and the embedded model at hand."""

import os
from collections.abc import Iterator

import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


@pytest.fixture(scope="session")
def tiny_tokenizer():
    from palestra.models.loading import load_model

    return load_model("palestra/tiny").tokenizer


@pytest.fixture
def tiny():
    """A fresh copy of the embedded model with its tokenizer."""
    from palestra.models.loading import load_model

    return load_model("palestra/tiny")


@pytest.fixture
def in_tmp(tmp_path, monkeypatch) -> Iterator[None]:
    """Run in an empty folder, so that run folders land there."""
    monkeypatch.chdir(tmp_path)
    yield
