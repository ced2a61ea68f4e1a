"""The embedded model behind a completer."""

import pytest

from palestra.servers.openai.inference import load_completer


@pytest.fixture(scope="session")
def model():
    return load_completer("palestra/tiny")
