"""Shared by all tests: offline, deterministic, and the embedded model at hand."""

import os
import tempfile

import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
HOME = tempfile.TemporaryDirectory(prefix="palestra-home-", ignore_cleanup_errors=True)
os.environ["PALESTRA_HOME"] = HOME.name  # trainings are listed; those of tests not among the user's


@pytest.fixture(scope="session")
def tiny_tokenizer():
    from palestra.models.loading import load_model

    return load_model("palestra/tiny").tokenizer


@pytest.fixture
def tiny():
    """A fresh copy of the embedded model with its tokenizer."""
    from palestra.models.loading import load_model

    return load_model("palestra/tiny")
