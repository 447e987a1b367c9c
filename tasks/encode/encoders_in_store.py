"""The encoders of a pipeline in the store, from where remote workers fetch them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from artifacts.models import IGNORED, fetch_model, files_below, put_model
from artifacts.store import Store
from runtimes.families import detect_family
from runtimes.pipeline_folder.folder import TEXT_PARTS, digest_encoders, vae_path
from runtimes.process.job import EncodeJob

PIPELINE, VAE = "pipeline", "vae"  # subfolders of the copy


@dataclass(frozen=True)
class EncodersInStore:
    """Where the encoders of a job are, for workers without the flow's folders."""

    url: str
    digest: str  # of digest_encoders

    def fetched(self, job: EncodeJob) -> EncodeJob:
        """The job with the folders of this machine's copy. Raises ModelNotFound."""
        model, vae = _folders(fetch_model(self.url, self.digest, _digest))
        return replace(job, model=str(model), vae=None if vae is None else str(vae))


def put_encoders(store: Store, model_folder: Path, vae_folder: Path | None) -> EncodersInStore:
    """Copy the VAE and the text encoders to the store, unless they are there."""
    digest = digest_encoders(model_folder, vae_folder)
    files = dict(_files(model_folder, vae_folder))
    return EncodersInStore(put_model(store, digest, files), digest)


def _files(model_folder: Path, vae_folder: Path | None) -> Iterator[tuple[str, Path]]:
    """(path in the copy, file) of all files that an encoder reads."""
    parts = TEXT_PARTS if vae_folder is not None else (*TEXT_PARTS, "vae")
    denoiser = detect_family(model_folder).denoiser
    for name in ("model_index.json", f"{denoiser}/config.json"):
        yield f"{PIPELINE}/{name}", model_folder / name
    for part in parts:
        yield from _below(model_folder / part, f"{PIPELINE}/{part}")
    if vae_folder is not None:
        yield from _below(vae_path(model_folder, vae_folder), VAE)


def _below(folder: Path, name: str) -> Iterator[tuple[str, Path]]:
    for file in files_below(folder):
        relative = file.relative_to(folder)
        if not IGNORED & set(relative.parts):
            yield f"{name}/{relative.as_posix()}", file


def _folders(copy: Path) -> tuple[Path, Path | None]:
    vae = copy / VAE
    return copy / PIPELINE, vae if vae.is_dir() else None


def _digest(copy: Path) -> str:
    return digest_encoders(*_folders(copy))
