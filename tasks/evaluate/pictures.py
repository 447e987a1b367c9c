"""Pictures that a model drew: made by a runtime's process, kept in the store, shared by key."""

from __future__ import annotations

import json
import logging
import shutil
import tarfile
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from artifacts.commit import open_checked
from artifacts.keys import digest_json
from artifacts.models import digest_model
from artifacts.store import SHARDS, Draft, Shard, Store
from runtimes.families import detect_family
from runtimes.families.unet_inputs import ExtraInputs
from runtimes.pipeline_folder.denoiser_config import folder_extras
from runtimes.process.job import Drawing, GenerateJob, Job
from tasks.progress import Progress
from tasks.tuned import BASE, Tuned

STAGE = "evaluate"
#: Raised when the meaning of drawn pictures, or of the metrics, changes.
VERSION = 2
LOSSES = "losses.json"
#: What of a pipeline folder changes its pictures; not its card, its metrics or its report.
DRAWING_PARTS = (
    "model_index.json",
    "scheduler",
    "text_encoder",
    "text_encoder_2",
    "text_encoder_3",
    "tokenizer",
    "tokenizer_2",
    "tokenizer_3",
    "transformer",
    "unet",
    "vae",
)
Event = dict[str, Any]
log = logging.getLogger("kiln")
Run = Callable[[Job, Callable[[Event], None]], Any]


@dataclass(frozen=True)
class Painter:
    """A model that draws: a pipeline folder, perhaps with other parts, a VAE or adapters in it."""

    digest: str  # of everything that changes its pictures
    folder: Path
    tuned: Tuned = BASE
    vae: Path | None = None

    def part(self, name: str) -> Path:
        """The folder of a part: its own, or the pipeline's."""
        return self.tuned.parts.get(name, self.folder / name)

    @property
    def extras(self) -> ExtraInputs:
        """What its denoiser sees beside text."""
        return folder_extras(self.part(detect_family(self.folder).denoiser))


@dataclass(frozen=True)
class Sitting:
    """The conditions that every painter draws under."""

    runtime: str
    device: str
    batch_size: int
    prompts: tuple[str, ...]
    sampler: dict[str, Any]  # seed, num_inference_steps, guidance_scale, height, width, dtype
    latents: str | None  # URL of the latents whose held-out loss is taken; None takes none
    latents_digest: str
    holdout: dict[str, Any]  # samples, draws, seed, noise_offset
    flash_attention: bool = True  # as train.mindspore.flash_attention

    def facts(self) -> dict[str, Any]:
        """What makes two sittings comparable; where and how fast it happened is no part of it."""
        held_out = {"latents": self.latents_digest, **self.holdout} if self.latents else None
        return {
            "prompts": list(self.prompts),
            "sampler": self.sampler,
            "held_out": held_out,
        }

    def key(self, painter: Painter) -> str:
        """Key of the shard with a painter's pictures."""
        parts = {"stage": STAGE, "version": VERSION, "model": painter.digest, **self.facts()}
        return digest_json(parts)


def draw(
    painters: Sequence[Painter],
    sitting: Sitting,
    store: Store,
    scratch: Path,
    run: Run,
    on_event: Callable[[Event], None] = lambda event: None,
) -> list[Shard]:
    """Every painter's pictures, from the store where they are there, else drawn in one process.

    The painters share folder and VAE. A drawing that was interrupted goes on in `scratch`.
    """
    found = {sitting.key(p): store.shard(STAGE, sitting.key(p)) for p in painters}
    missing = {sitting.key(p): p for p in painters if found[sitting.key(p)] is None}
    if missing:
        outs = {key: scratch / key for key in missing}
        run(_job(missing, outs, sitting, store.compiled_url), on_event)
        for key, out in outs.items():
            found[key] = _commit(store, key, out, len(sitting.prompts))
            shutil.rmtree(out)
    shards = [found[sitting.key(p)] for p in painters]
    return [shard for shard in shards if shard is not None]


def told(stage: str, progress: Progress) -> Callable[[Event], None]:
    """Turns what a generate job says into progress, and log lines of how long it took."""

    def on_event(event: Event) -> None:
        if event["event"] == "drawn":
            done, total = event["done"], event["total"]
            progress(done, total, f"{done} of {total} pictures")
        elif event["event"] == "result" and event.get("drawn"):
            compiled = event["compile_seconds"]
            words = f", after {compiled:.1f} s of compiling" if compiled else ""
            log.info(
                "%s: drew %d pictures in %.1f s (%.1f s of it for the first batch)%s",
                *(stage, event["drawn"], event["seconds"], event["first_seconds"], words),
            )

    return on_event


@contextmanager
def scratch(draft: Draft) -> Iterator[Path]:
    """Where pictures are drawn: beside the artifact if that is local, to go on after a kill."""
    if draft.store.is_local:
        folder = Path(draft.path) / "drawing"
        yield folder
        shutil.rmtree(folder, ignore_errors=True)
    else:
        with tempfile.TemporaryDirectory(prefix="kiln-drawing-") as beside:
            yield Path(beside)


def read_pictures(store: Store, shard: Shard) -> Iterator[NDArray[np.uint8]]:
    """Drawn pictures [H, W, 3], in the order of the prompts, one in memory at a time."""
    for name, data in _members(store, shard):
        if name.endswith(".png"):
            yield np.asarray(Image.open(BytesIO(data)).convert("RGB"))


def read_losses(store: Store, shard: Shard) -> NDArray[np.float64]:
    """Held-out losses [N], each over its noise draws; empty when none were taken."""
    losses = [json.loads(data)["losses"] for name, data in _members(store, shard) if name == LOSSES]
    return np.array(losses[0] if losses else [], np.float64)


def digest_pipeline(folder: Path) -> str:
    """sha256 of what of a pipeline folder changes its pictures."""
    return digest_model(folder, DRAWING_PARTS)


def _job(
    painters: dict[str, Painter], outs: dict[str, Path], sitting: Sitting, compiled: str
) -> GenerateJob:
    first = next(iter(painters.values()))
    if any((p.folder, p.vae) != (first.folder, first.vae) for p in painters.values()):
        raise ValueError("painters of one job must share their pipeline folder and VAE")
    drawings = (
        Drawing(str(outs[key]), p.tuned.part_names(), p.tuned.lora_name())
        for key, p in painters.items()
    )
    sampler = {name: value for name, value in sitting.sampler.items() if name != "dtype"}
    return GenerateJob(
        runtime=sitting.runtime,
        model=str(first.folder),
        drawings=tuple(drawings),
        prompts=sitting.prompts,
        sampler={**sampler, "batch_size": sitting.batch_size},
        device=sitting.device,
        dtype=sitting.sampler["dtype"],
        latents=sitting.latents,
        holdout=sitting.holdout if sitting.latents else {},
        vae=None if first.vae is None else str(first.vae),
        compiled=compiled,
        flash_attention=sitting.flash_attention,
    )


def _commit(store: Store, key: str, out: Path, count: int) -> Shard:
    pictures = [out / f"{number:05d}.png" for number in range(count)]
    losses = [path for path in [out / LOSSES] if path.exists()]
    tar = out / "drawn.tar"
    with tarfile.open(tar, "w", format=tarfile.USTAR_FORMAT) as stream:
        for path in [*pictures, *losses]:
            data = path.read_bytes()
            member = tarfile.TarInfo(path.name)  # its defaults carry no clock and no owner
            member.size = len(data)
            stream.addfile(member, BytesIO(data))
    return store.commit_shard(STAGE, key, {".tar": str(tar)}, {"pictures": count})


def _members(store: Store, shard: Shard) -> Iterator[tuple[str, bytes]]:
    """(name, bytes) of every file. Raises Damaged at the end of a tar that is another."""
    (entry,) = shard.files
    url = store.url_of(f"{STAGE}/{SHARDS}/{entry.path}")
    with open_checked(url, entry.sha256) as stream, tarfile.open(fileobj=stream, mode="r|") as tar:
        for member in tar:
            file = tar.extractfile(member)
            if file is not None:
                yield member.name, file.read()
