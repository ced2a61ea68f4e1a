"""The key that W&B needs. tests/interfaces/test_wandb_sync.py has a run that `wandb sync` reads."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

from palestra.core.config import RunConfig
from palestra.core.errors import PalestraError
from palestra.core.run_folder import RunFolder
from palestra.runs.tracking.open import open_trackers

pytestmark = pytest.mark.skipif(find_spec("wandb") is None, reason="wandb is not installed")


def test_online_without_a_key_is_refused_before_training(tmp_path: Path) -> None:
    config = RunConfig.build({"track": {"report_to": ["wandb"]}})
    with pytest.raises(PalestraError, match="WANDB_API_KEY"):
        open_trackers(config, RunFolder(tmp_path), {}, None)


def test_a_stored_login_counts_as_a_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from palestra.runs.tracking.wandb import _has_key

    (tmp_path / "netrc").write_text("machine api.wandb.ai\n  login user\n  password secret\n")
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    assert _has_key()
