"""No tracker of a test calls home, finds a key or writes outside its folder."""

from pathlib import Path

import pytest
import trackers


@pytest.fixture(autouse=True)
def quiet_services(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    trackers.silence_services(monkeypatch, tmp_path)
