"""A trained model as a repository on the Hugging Face hub, with a card that has its evaluation."""

from __future__ import annotations

import json
import os
import re
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from palestra.core.errors import ServiceError, SettingError
from palestra.core.files import write_json, write_text
from palestra.models.export.card import model_card

_REPO = re.compile(r"[\w.-]+/[\w.-]+")


@dataclass(frozen=True)
class HubRepo:
    """A repository that has been uploaded to."""

    name: str
    url: str
    private: bool  # as asked for; one that existed keeps its visibility


def to_hub(
    model: str, repo: str, *, private: bool = True, adapter: bool = False, report: Mapping[str, Any] | None = None
) -> HubRepo:
    """Upload a model and its card; an adapter is merged into its base, unless `adapter`. `report` is the run's.

    The token is that of HF_TOKEN or `hf auth login`; HF_ENDPOINT names another hub.
    """
    from palestra.models.adapters import RECORD, is_adapter  # torch: a wrong repository is reported without it
    from palestra.models.export.hf import to_hf
    from palestra.models.export.source import read_record

    check_repo(repo)
    folder = Path(model).expanduser()
    if adapter and not is_adapter(folder):
        raise SettingError(f"{model} is no adapter; leave out --adapter to upload the whole model")
    with tempfile.TemporaryDirectory() as made:
        copy = Path(made, "model")
        shutil.copytree(folder, copy) if adapter else to_hf(model, copy)
        record = read_record(copy)
        # paths of this machine are nobody else's business
        write_json(copy / RECORD, {key: value for key, value in record.items() if key != "source"})
        card = model_card(repo, read_record(folder) | record, report, is_adapter=adapter)
        write_text(copy / "README.md", card)
        return _upload(copy, repo, private)


def check_repo(repo: str) -> None:
    """Raise for a repository or a machine to which nothing can be uploaded, before any work."""
    if not _REPO.fullmatch(repo):
        raise SettingError(f"{repo!r} is no repository of the hub; expected USER/NAME, such as my-name/my-agent")
    from huggingface_hub import constants, get_token

    if constants.is_offline_mode():
        raise SettingError("HF_HUB_OFFLINE is set, so nothing can be uploaded; unset it, or use --to hf for a folder")
    if not get_token():
        raise SettingError("uploading needs a token of the hub that may write; run `hf auth login`, or set HF_TOKEN")


def _upload(folder: Path, repo: str, private: bool) -> HubRepo:
    import httpx
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError

    api = HfApi(library_name="palestra")
    try:
        url = api.create_repo(repo, private=private, exist_ok=True)
        api.upload_folder(repo_id=repo, folder_path=folder, commit_message="Upload a model trained with Palestra")
    except HfHubHTTPError as error:
        status = error.response.status_code if error.response is not None else 0
        remedy = "; check that the token may write to it (`hf auth whoami`)" if status in (401, 403, 404) else ""
        raise ServiceError(f"the hub refused the upload to {repo} ({_first_line(error)}){remedy}") from error
    except (httpx.HTTPError, OSError, json.JSONDecodeError) as error:
        where = os.environ.get("HF_ENDPOINT", "huggingface.co")
        raise ServiceError(f"the upload to {repo} failed ({_first_line(error)}); is {where} reachable?") from error
    return HubRepo(repo, str(url), private)


def _first_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
