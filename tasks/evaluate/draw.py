"""Pictures of an evaluation: drawn by a runtime's process, cached, and laid out to compare.

The store caches sampled pictures by content key. The before/after grid has the base model's
pictures above the tuned model's. A panel has pictures of the same prompts and noise by each model
of an evaluation.
"""

from __future__ import annotations

import json
import logging
import math
import shutil
import tarfile
import tempfile
import textwrap
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from io import BytesIO
from itertools import chain, islice
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont, ImageOps

from artifacts.image_shards import add_member
from artifacts.models import digest_model
from artifacts.records import digest_json, open_checked
from artifacts.store import Artifact, Draft, Shard, Store
from configs.settings.evaluate import Sampling
from runtimes.families.inpainting_aesthetics import ExtraInputs
from runtimes.pipeline_folder.folder import Base, folder_extras
from runtimes.process.job import GenerateJob, Job
from tasks import control_pictures
from tasks.build_or_reuse import GRID
from tasks.child_process import Event
from tasks.panels import Comparison, picture_grid, to_png
from tasks.progress import Progress
from tasks.trained_weights import BASE, TrainedWeights

STAGE: Final = "evaluate"
#: Increment when the content of the pictures or of the losses changes.
VERSION = 5
LOSSES = "losses.json"
#: The parts of a pipeline folder that affect its pictures.
DRAWING_PARTS = (
    *("model_index.json", "scheduler", "transformer", "unet", "vae"),
    *("text_encoder", "text_encoder_2", "text_encoder_3"),
    *("tokenizer", "tokenizer_2", "tokenizer_3"),
)
#: The settings of `evaluate` and `generate` that a job's `sampler` has.
SAMPLER_SETTINGS = {
    *("seed", "scheduler", "num_inference_steps", "guidance_scale", "true_cfg_scale"),
    *("height", "width"),
    *("aesthetic_score", "negative_aesthetic_score"),
}
log = logging.getLogger("kiln")


def sampler_settings(settings: Sampling, *more: str) -> dict[str, Any]:
    """The settings of a job's `sampler`: SAMPLER_SETTINGS and `more`, by name."""
    scale = settings.controlnet_conditioning_scale
    own = {} if scale == 1 else {"controlnet_conditioning_scale": scale}
    return settings.model_dump(mode="json", include=SAMPLER_SETTINGS | set(more)) | own


RunJob = Callable[[Job, Callable[[Event], None]], Any]


@dataclass(frozen=True)
class EvalModel:
    """A pipeline to sample from, with optional trained weights."""

    digest: str  # sha256 of all content that affects the pictures
    base: Base
    weights: TrainedWeights = BASE
    evaluated: Mapping[str, Any] = field(default_factory=dict)  # `evaluate` of its recipe.yaml
    encoded: Mapping[str, Any] = field(default_factory=dict)  # `encode` of the same

    def part(self, name: str) -> Path:
        """The folder of a part: the trained part's if there is any, else the pipeline's."""
        return self.weights.parts.get(name, self.base.part(name))

    def on(self, base: Base) -> EvalModel:
        """The model's adapters on another base, whose scheduler draws."""
        plain = digest_eval_model(base, None)
        if self.weights.lora is None:
            return EvalModel(plain, base)
        digest = digest_json({"adapters": self.digest, "on": plain})
        return EvalModel(digest, base, TrainedWeights(lora=self.weights.lora))

    @property
    def extras(self) -> ExtraInputs:
        """The denoiser's conditioning inputs other than text."""
        return folder_extras(self.part(self.base.family.denoiser))


@dataclass(frozen=True)
class SamplingSpec:
    """What all models of an evaluation share: the job, and what identifies its held-out losses."""

    job: GenerateJob  # without drawings
    latents_digest: str
    family_facts: dict[str, str]  # Family.key_facts
    references: Sequence[Sequence[str]] | None = None  # sha256 of those of each picture

    def facts(self) -> dict[str, Any]:
        """The settings that affect pictures or losses; where and how they are drawn does not."""
        sampler = {n: value for n, value in self.job.sampler.items() if n != "batch_size"}
        held_out = {"latents": self.latents_digest, **self.job.holdout, **self.family_facts}
        facts: dict[str, Any] = {
            "prompts": list(self.job.prompts),
            "sampler": sampler | {"dtype": self.job.dtype},
            "held_out": held_out if self.job.latents else None,
        }
        if self.references:
            sizes = [self.job.reference_pixels, self.job.reference_step]
            facts |= {"references": self.references, "reference_sizes": sizes}
        if self.job.controls:
            facts["controls"] = control_pictures.digests(self.job.controls)
        return facts | ({"first": self.job.first} if self.job.first else {})

    def key(self, model: EvalModel) -> str:
        """Store key (sha256) of the shard with a model's pictures."""
        parts = {"stage": STAGE, "version": VERSION, "model": model.digest, **self.facts()}
        return digest_json(parts)


def draw(
    models: Sequence[EvalModel], spec: SamplingSpec, draft: Draft, run: RunJob, progress: Progress
) -> list[Shard]:
    """One shard of pictures per model, in the order of `models`.

    Shards in the store are reused; one job draws the others, or resumes them in the draft.

    Args:
        models: all with the same pipeline folder and VAE.
        run: runs a job and passes on its events.
    """
    store = draft.store
    keyed = {spec.key(model): model for model in models}
    stored = {key: store.shard(STAGE, key) for key in keyed}
    with scratch(draft) as folder:
        outs = {key: folder / key for key, shard in stored.items() if shard is None}
        if outs:
            drawings = tuple(keyed[key].weights.drawing(out) for key, out in outs.items())
            base = models[0].base
            compiled = store.compiled_url
            job = replace(spec.job, **base.job_fields, drawings=drawings, compiled=compiled)
            run(job, progress_callback(progress))
        for key, out in outs.items():
            stored[key] = _commit(store, key, out, len(spec.job.prompts))
            shutil.rmtree(out)
    shards = [stored[spec.key(model)] for model in models]
    return [shard for shard in shards if shard is not None]


def progress_callback(progress: Progress) -> Callable[[Event], None]:
    """A handler of a generate job's events that reports progress and logs the timings."""

    def on_event(event: Event) -> None:
        if event["event"] == "drawn":
            done = event["done"]
            total = event["total"]
            progress(done, total, f"{done:,} of {total:,} pictures drawn")
        elif event["event"] == "losses":
            numbers = (event["model"], event["models"])
            log.info("%s: held-out losses of model %d of %d", progress.stage, *numbers)
        elif event["event"] == "result" and event.get("drawn"):
            compiled = event["compile_seconds"]
            suffix = f", after {compiled:.1f} s of compiling" if compiled else ""
            log.info(
                "%s: drew %d pictures in %.1f s (%.1f s of it for the first batch)%s",
                *(progress.stage, event["drawn"], event["seconds"], event["first_seconds"], suffix),
            )

    return on_event


@contextmanager
def scratch(draft: Draft) -> Iterator[Path]:
    """A local folder for unfinished pictures, removed on success.

    It lies in the draft of a local store, so that an interrupted job can resume. Jobs of a remote
    store use a temporary folder and restart.
    """
    if draft.store.is_local:
        folder = Path(draft.path) / "drawing"
        yield folder
        shutil.rmtree(folder, ignore_errors=True)
    else:
        with tempfile.TemporaryDirectory(prefix="kiln-drawing-") as temporary:
            yield Path(temporary)


def read_pictures(store: Store, *rounds: Shard) -> Iterator[NDArray[np.uint8]]:
    """Pictures u8 [H, W, 3] in the order of the prompts, one in memory at a time."""
    for data in chain.from_iterable(read_files(store, shard) for shard in rounds):
        yield np.asarray(Image.open(BytesIO(data)).convert("RGB"))


def read_files(store: Store, shard: Shard) -> Iterator[bytes]:
    """PNG bytes of a shard's pictures, in the order of the prompts."""
    return (data for name, data in _members(store, shard) if name.endswith(".png"))


def read_chosen(store: Store, numbers: set[int], *rounds: Shard) -> dict[int, NDArray[np.uint8]]:
    """Some pictures u8 [H, W, 3], by number."""
    pictures = enumerate(read_pictures(store, *rounds))
    return {number: picture for number, picture in pictures if number in numbers}


class HeldOutLosses(NamedTuple):
    """The losses of N held-out samples; N is 0 if none were computed."""

    losses: NDArray[np.float64]  # [N, levels], from the least noise to the most
    sources: Sequence[str]  # of each sample; "" without a mixture

    def by_source(self) -> dict[str, NDArray[np.float64]]:
        """Source of the mixture -> its rows of `losses`."""
        names = sorted({*self.sources} - {""})
        return {name: self.losses[[of == name for of in self.sources]] for name in names}


def read_losses(store: Store, shard: Shard) -> HeldOutLosses:
    """The held-out losses beside a model's pictures."""
    for name, data in _members(store, shard):
        if name == LOSSES:
            found = json.loads(data)
            losses = np.array(found["losses"], np.float64)
            return HeldOutLosses(losses, found.get("sources", [""] * len(losses)))
    return HeldOutLosses(np.zeros((0, 0)), [])


def digest_pipeline(base: Base) -> str:
    """sha256 of the parts of a pipeline folder that affect its pictures, its own VAE included."""
    digest = digest_model(base.folder, DRAWING_PARTS)
    unusual = base.unusual_texts
    return digest_json({"pipeline": digest, "texts": unusual}) if unusual else digest


def digest_eval_model(base: Base, weights: Any) -> str:
    """sha256 of all that affects a model's pictures; `weights` identifies trained weights."""
    vae = None if base.vae_folder is None else digest_model(base.vae_folder)
    return digest_json({"pipeline": digest_pipeline(base), "vae": vae, "tuned": weights})


def _commit(store: Store, key: str, out: Path, count: int) -> Shard:
    names = [f"{number:05d}.png" for number in range(count)]
    names += [LOSSES] if (out / LOSSES).exists() else []
    tar = out / "drawn.tar"
    with tarfile.open(tar, "w", format=tarfile.USTAR_FORMAT) as stream:
        for name in names:
            add_member(stream, name, (out / name).read_bytes())
    return store.commit_shard(STAGE, key, {".tar": str(tar)}, {"pictures": count})


def _members(store: Store, shard: Shard) -> Iterator[tuple[str, bytes]]:
    """(name, bytes) of every file. Raises Damaged at the end of a tar that is another."""
    (entry,) = shard.files
    url = store.shard_url(STAGE, entry.path)
    with open_checked(url, entry.sha256) as stream, tarfile.open(fileobj=stream, mode="r|") as tar:
        for member in tar:
            file = tar.extractfile(member)
            if file is not None:
                yield member.name, file.read()


#: Rows that no model has drawn.
BESIDE = ("reference", "target")
#: Folder of references and targets that are shown, and their name in the summary.
BESIDE_FOLDER = "beside"
CELL = (96, 256)  # minimum and maximum width of a cell, pixels
COLUMNS = 10
MARGIN = 6
LABEL = 76
LINE = 13
LINES = 4
INK = (40, 30, 25)
PAPER = (250, 246, 240)

#: A prompt, and model -> its picture u8 [H, W, 3], in row order. `reference` and `target` are rows,
#: too; a column may lack them.
Column = tuple[str, Mapping[str, NDArray[np.uint8]]]


def choose(prompts: Sequence[Hashable], limit: int = COLUMNS) -> list[int]:
    """Indices of the first picture of each distinct prompt, `limit` at most."""
    return [prompts.index(prompt) for prompt in islice(dict.fromkeys(prompts), limit)]


def render(sets: dict[str, list[Column]]) -> bytes:
    """PNG bytes with one block per prompt set, one row per model, one column per prompt."""
    _, rows = next(iter(sets.values()))[0]
    drawn = next(picture for name, picture in rows.items() if name not in BESIDE)
    cell = _cell_size(drawn)
    widest = max(len(columns) for columns in sets.values())
    heads = LINE + MARGIN + LINES * LINE + MARGIN
    blocks = [heads + len(_rows(c)) * (cell[1] + MARGIN) for c in sets.values()]
    width = LABEL + widest * (cell[0] + MARGIN) + MARGIN
    page = Image.new("RGB", (width, sum(blocks) + MARGIN), PAPER)
    top = MARGIN
    for block, (name, columns) in zip(blocks, sets.items(), strict=True):
        _draw_block(page, top, name, columns, cell)
        top += block
    return to_png(page)


def _rows(columns: list[Column]) -> list[str]:
    """The rows of a block: its references above the models' pictures, its targets below."""
    names = list(dict.fromkeys(name for _, pictures in columns for name in pictures))
    order = {"reference": -1, "target": 1}
    return sorted(names, key=lambda name: order.get(name, 0))


def _draw_block(
    page: Image.Image, top: int, name: str, columns: list[Column], cell: tuple[int, int]
) -> None:
    pen = ImageDraw.Draw(page)
    small = ImageFont.load_default(11)
    large = ImageFont.load_default(14)
    pen.text((MARGIN, top), f"prompts: {name}", INK, large)
    first_row = top + LINE + MARGIN + LINES * LINE
    cells = []
    blank = Image.new("RGB", cell, PAPER)
    for number, model in enumerate(_rows(columns)):
        middle = first_row + number * (cell[1] + MARGIN) + cell[1] // 2
        pen.text((MARGIN, middle), model, INK, large, anchor="lm")
        for _, pictures in columns:
            fit = _fit if model not in BESIDE else _pad
            cells.append(fit(pictures[model], cell) if model in pictures else blank)
    for index, (prompt, _) in enumerate(columns):
        left = LABEL + index * (cell[0] + MARGIN)
        words = textwrap.wrap(prompt, max(8, cell[0] // 6), max_lines=LINES, placeholder="…")
        pen.multiline_text((left, top + LINE + MARGIN - 2), "\n".join(words), INK, small, spacing=1)
    block = picture_grid(cells, len(cells), len(columns), gap=MARGIN, paper=PAPER)
    page.paste(block, (LABEL, first_row))


def _cell_size(picture: NDArray[np.uint8]) -> tuple[int, int]:
    """Width and height of a cell in pixels.

    Pictures below the minimum width are scaled by an integer, those above the maximum shrink.
    """
    height, width = picture.shape[:2]
    scale = math.ceil(CELL[0] / width) if width < CELL[0] else min(1.0, CELL[1] / width)
    return round(width * scale), round(height * scale)


def _fit(picture: NDArray[np.uint8], cell: tuple[int, int]) -> Image.Image:
    image = Image.fromarray(picture)
    grows = cell[0] >= image.width
    return image.resize(cell, Image.Resampling.NEAREST if grows else Image.Resampling.LANCZOS)


def _pad(picture: NDArray[np.uint8], cell: tuple[int, int]) -> Image.Image:
    """As `_fit`, whole and of its own aspect ratio."""
    scale = min(cell[0] / picture.shape[1], cell[1] / picture.shape[0])
    size = (max(1, round(picture.shape[1] * scale)), max(1, round(picture.shape[0] * scale)))
    return ImageOps.pad(_fit(picture, size), cell, color=PAPER)


SHOWN = 20  # maximum number of prompts


def compare_pictures(artifact: Artifact, champion: Artifact | None) -> Comparison:
    """The first picture of each prompt, by each model.

    Args:
        champion: a comparable evaluation of the champion.
    """
    sets = artifact.summary.get("prompts") or artifact.manifest["settings"]["prompts"]
    beside = artifact.summary.get(BESIDE_FOLDER, {})  # set -> picture number -> kind -> file
    prompts = [text for texts in sets.values() for text in texts]
    chosen = list[int]()
    start = 0
    for name, texts in sets.items():
        share = max(1, SHOWN // len(sets))
        own = [int(n) - start for n in beside[name]] if name in beside else choose(texts)
        chosen += [start + n for n in own[:share]]
        start += len(texts)
    drawn = artifact.summary["drawn"]  # model -> key of its shard
    if champion is not None:
        champions = champion.summary["drawn"]["tuned"]
        drawn = {"base": drawn["base"], "champion": champions, **drawn}
    by_model = [_pictures(artifact.store, key, set(chosen)) for key in drawn.values()]
    rows = [(prompts[n], [pictures[n] for pictures in by_model]) for n in chosen]
    files = {int(n): kinds for own in beside.values() for n, kinds in own.items()}
    shown = [
        [(kind, artifact.read(path)) for kind, path in files.get(n, {}).items()] for n in chosen
    ]
    about = ("Before and after", tuple(drawn), rows, artifact.read(GRID))
    return Comparison(*about, shown if files else ())


def _pictures(store: Store, key: str, numbers: set[int]) -> dict[int, bytes]:
    """Number -> PNG of some pictures of a shard."""
    shard = store.shard(STAGE, key)
    if shard is None:
        raise FileNotFoundError(f"the pictures {key[:12]} are missing")
    chosen = read_chosen(store, numbers, shard)
    return {number: to_png(Image.fromarray(picture)) for number, picture in chosen.items()}
