"""A server that answers as vLLM does, and policies that are connected to it."""

import sys
from contextlib import ExitStack
from functools import cache
from pathlib import Path

import pytest
from served import served

sys.path.insert(0, str(Path(__file__).parent))
from fake_vllm import FakeVllm, random_model

from palestra.extras.vllm.server import VllmServerPolicy
from palestra.policy.local import LocalPolicy


@pytest.fixture
def fake(tiny_tokenizer):
    policy = LocalPolicy(random_model(0), tiny_tokenizer, kv_memory_gib=0.02, self_check=False)
    return FakeVllm(policy, tiny_tokenizer, context=200, adapters={})


@pytest.fixture
def connect(fake, tiny_tokenizer, tmp_path):
    """A function that returns a policy of the fake server, which starts with the first call."""
    with ExitStack() as running:

        @cache
        def start():
            return running.enter_context(served(fake.app()))

        def make(url=None, folder=tmp_path, **options):
            options = {"temperature": 0.7, "timeout_s": 5} | options
            return VllmServerPolicy(url or start(), tiny_tokenizer, weights_folder=folder, **options)

        yield make
