"""docs/tinker_compatibility.md is what the script finds: every public method of the installed SDK, asked for here."""

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "scripts"))


@pytest.mark.slow("asks for 76 methods: make test-tinker")
@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
def test_the_table_of_compatibility_is_what_the_server_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    tinker = pytest.importorskip("tinker")
    import tinker_compatibility

    written = tinker_compatibility.PAGE.read_text(encoding="utf-8")
    if f"version {tinker.__version__}." not in written:
        pytest.skip(f"the page is about another version of the SDK than {tinker.__version__}")
    monkeypatch.setenv("PALESTRA_HOME", "/nowhere")  # both are set anew by the script, and put back after the test
    monkeypatch.setenv("TINKER_TELEMETRY", "0")
    found = tinker_compatibility.page()
    assert found == written, "run `python scripts/tinker_compatibility.py` and look at what has changed"
