"""The Weights & Biases tracker of a run.

<work>/wandb.json     the W&B run id, reused at each resume
<work>/wandb/...      W&B's files (a remote work folder receives them when the run ends)
"""

from __future__ import annotations

import io
import json
import os
import shutil
import tempfile
import uuid
from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

from fsspec import AbstractFileSystem
from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem
from PIL import Image

from artifacts.records import write_atomic
from configs.settings.train_parts import Wandb
from runtimes.contract import WrongInput

KEY = "WANDB_API_KEY"


def check_wandb(settings: Wandb | None) -> None:
    """Raise WrongInput if the wandb package or its API key is missing, before training starts."""
    if settings is None:
        return
    if find_spec("wandb") is None:
        raise WrongInput("train.wandb needs the package wandb, which is not installed here")
    if settings.mode == "online" and not os.environ.get(KEY):
        raise WrongInput(
            f"train.wandb needs a key in the environment variable {KEY}; or set "
            "train.wandb.mode to offline"
        )


class WandbTracker:
    """Implements experiment_trackers.Tracker.

    After a resume, W&B itself drops the points of repeated steps.

    Raises:
        WrongInput: W&B rejects the API key, the project or the entity.
    """

    def __init__(self, settings: Wandb, work: str, config: dict[str, Any]) -> None:
        import wandb  # here, since the import takes a second

        self._fs, root = url_to_fs(work)
        self._root = root.rstrip("/")
        self._local = isinstance(self._fs, LocalFileSystem)
        self._folder = self._root if self._local else tempfile.mkdtemp(prefix="kiln-wandb-")
        self._image = wandb.Image
        try:
            self._run = wandb.init(
                project=settings.project,
                entity=settings.entity,
                mode=settings.mode,
                id=_run_id(self._fs, f"{self._root}/wandb.json"),
                resume="allow",
                dir=self._folder,
                config=config,
                # The stage already logs our output, and our git checkout is not the user's project.
                settings=wandb.Settings(
                    console="off", silent=True, disable_git=True, disable_code=True
                ),
            )
        except Exception as error:
            self._delete_temporary()
            if isinstance(error, wandb.errors.AuthenticationError | wandb.errors.UsageError):
                raise WrongInput(f"train.wandb: {error}") from None
            raise

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def picture(self, step: int, name: str, png: bytes) -> None:
        self._run.log({name: self._image(Image.open(io.BytesIO(png)))}, step=step)

    def rewind(self, step: int) -> None:
        pass

    def flush(self) -> None:
        pass  # W&B's own process uploads

    def close(self, done: bool) -> None:
        self._run.finish(exit_code=0 if done else 1)
        if not self._local:
            self._fs.put(f"{self._folder}/wandb/", f"{self._root}/wandb/", recursive=True)
            self._delete_temporary()

    def _delete_temporary(self) -> None:
        if not self._local:
            shutil.rmtree(self._folder, ignore_errors=True)


def _run_id(fs: AbstractFileSystem, path: str) -> str:
    """The stored W&B run id, or a new one, which is stored."""
    if fs.exists(path):
        return str(json.loads(fs.cat_file(path))["id"])
    number = uuid.uuid4().hex[:8]
    write_atomic(fs, path, json.dumps({"id": number}).encode())
    return number
