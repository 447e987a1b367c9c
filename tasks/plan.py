"""Plan a recipe's training on a TPU slice before it is rented: memory, work, time, storage, cost.

The step is compiled by a process of its own (runtimes/jax/plan.py). What it found is kept in the
store, by the content of what was asked: a plan that was made is not made again.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from importlib.metadata import PackageNotFoundError, distributions, version
from pathlib import Path
from typing import Any

from artifacts.commit import read_record, write_record
from artifacts.keys import digest_json
from artifacts.models import resolve_configs
from artifacts.store import Store
from configs.schema import Recipe
from configs.training import Train
from runtimes.contract import WrongInput
from runtimes.jax.plan import Plan, Request
from runtimes.pipeline_folder.describe import describe_encoders, read_config, vae_path
from runtimes.spmd.tpu_specs import Slice, parse_slice

#: Raised when the step that is compiled changes, or what is read of what the compiler says.
VERSION = 3
#: What libtpu's folder has after our environment's name: within it, it would slow every start.
COMPILER = "-libtpu"
#: Of a chip's peak, where the compiler estimates no time: what good training code reaches.
USUAL_SHARE = 0.4
#: Train settings that decide which program the step is.
OF_THE_STEP = (
    "method",
    "lora",
    "train_text_encoder",
    "inpainting",
    "aesthetic_score",
    "optimizer",
    "ema_decay",
    "max_grad_norm",
    "mixed_precision",
    "gradient_checkpointing",
    "compile",
    "fsdp",
)
PACKAGES = ("jax", "jaxlib", "torch", "torchax", "diffusers", "transformers")


class PlanFailed(RuntimeError):
    """The step could not be compiled; the message has the compiler's last words."""


@dataclass(frozen=True)
class Size:
    """How a slice takes a step's batch."""

    micro_batch_size: int  # samples of each host's process in a forward pass
    share: int  # and in a step
    where: Slice

    @property
    def per_chip(self) -> int:
        """Samples of a chip in a forward pass, those that fill it up included."""
        return -(-self.micro_batch_size * self.where.hosts // self.where.chips)

    @property
    def micro_batches(self) -> int:
        return -(-self.share // self.micro_batch_size)

    @property
    def global_batch_size(self) -> int:
        return self.share * self.where.hosts

    def with_per_chip(self, count: int) -> Size:
        """The same batch in other micro-batches; a larger one where it is less than one of them."""
        micro = count * self.where.chips // self.where.hosts
        return replace(self, micro_batch_size=micro, share=max(self.share, micro))


@dataclass(frozen=True)
class Planned:
    """What is told of a recipe."""

    recipe: Recipe
    where: Slice
    size: Size
    plan: Plan
    info: dict[str, Any]  # of the encoders: see describe_encoders
    largest: Size | None = None  # that fits, if it was looked for

    @property
    def fits(self) -> bool:
        return _fits(self.plan, self.where)

    @property
    def step_seconds(self) -> float | None:
        """Of a step on the slice; None where nothing is known to tell it by."""
        if self.plan.optimal_seconds is not None:
            return self.plan.optimal_seconds
        if self.plan.flops_per_image is None:
            return None
        images = self.size.per_chip * self.size.micro_batches
        return self.plan.flops_per_image * images / (self.where.chip.peak * USUAL_SHARE)

    @property
    def assumption(self) -> str:
        """What `step_seconds` rests on."""
        if self.plan.optimal_seconds is not None:
            return "as the compiler estimates its own program, batches always ready"
        return f"at {USUAL_SHARE:.0%} of the chip's peak, batches always ready"

    @property
    def steps(self) -> int | None:
        """Steps of the run; of epochs they are known where plan.pictures is set."""
        train, pictures = self.recipe.train, self.recipe.plan.pictures
        if train.epochs is not None and pictures is None:
            return None
        return train.with_steps(pictures or 0).steps

    @property
    def hours(self) -> float | None:
        seconds = self.step_seconds
        if seconds is None or self.steps is None:
            return None
        return seconds * self.steps / 3600

    @property
    def cost(self) -> float | None:
        price = self.recipe.plan.chip_hour_price
        if self.hours is None or price is None:
            return None
        return self.hours * self.where.chips * price

    @property
    def bytes_per_picture(self) -> int:
        """Of latents (16 bits: mean and log-variance), of masks and the mean of what each leaves,
        and of one caption's embeddings."""
        info, encode = self.info, self.recipe.encode
        pixels = (encode.resolution // info["vae_scale_factor"]) ** 2
        moments = 2 * 2 * info["latent_channels"] * pixels
        masked = encode.masks * (1 + 2 * info["latent_channels"]) * pixels
        pictures = (moments + masked) * (2 if encode.flip else 1)
        return pictures + 2 * (info["tokens"] * info["prompt_dim"] + (info["pooled_dim"] or 0))


def make_plan(
    recipe: Recipe, topology: str, *, search: bool, say: Callable[[str], None]
) -> Planned:
    """Plan a recipe. The largest batch is looked for if that is asked, or if the recipe's is too
    large.

    Args:
        say: is told what is being compiled, which takes minutes.

    Raises:
        ModelNotFound, WrongInput: the recipe or the slice cannot be planned with.
        PlanFailed: the compiler failed.
    """
    where = parse_slice(topology)
    size = _size(recipe, where)
    model = resolve_configs(recipe.model.path, revision=recipe.model.revision)
    vae = None
    if recipe.model.vae is not None:
        vae = vae_path(model, resolve_configs(recipe.model.vae))
    measure = _Measure(recipe, where, model, vae, say)
    found = Planned(recipe, where, size, measure(size), describe_encoders(model, vae))
    if found.fits and not search:
        return found
    return replace(found, largest=_largest(measure, size))


def _size(recipe: Recipe, where: Slice) -> Size:
    """The recipe's batch on a slice, each chip with as much as another."""
    settings = recipe.train
    if settings.global_batch_size % where.hosts:
        raise WrongInput(
            f"train.global_batch_size {settings.global_batch_size} cannot be shared by the "
            f"{where.hosts} hosts of {where.name}: make it a multiple"
        )
    share = settings.global_batch_size // where.hosts
    return Size(min(settings.micro_batch_size or share, share), share, where)


class _Measure:
    """Plans of one recipe's step by its batch, each made once."""

    def __init__(
        self,
        recipe: Recipe,
        where: Slice,
        model: Path,
        vae: Path | None,
        say: Callable[[str], None],
    ) -> None:
        self._recipe, self._where, self._say = recipe, where, say
        self._model, self._vae = model, vae
        self._store = Store(recipe.store)
        self._plans: dict[Size, Plan] = {}

    def __call__(self, size: Size) -> Plan:
        if size not in self._plans:
            self._plans[size] = self._made(size)
        return self._plans[size]

    def _made(self, size: Size) -> Plan:
        path = self._recipe.train.denoiser_config
        request = Request(
            model=str(self._model),
            train=_of_the_step(self._recipe.train, size),
            resolution=self._recipe.encode.resolution,
            topology=self._where.name,
            vae=None if self._vae is None else str(self._vae),
            denoiser_config=None if path is None else read_config(Path(path)),
        )
        place = f"{self._store.root}/plans/{self._key(request)}.json"
        try:
            kept = read_record(self._store.fs, place)
        except ValueError:  # damaged: it is made again
            kept = None
        if kept is None:
            self._say(
                f"compiling the step for {self._where.name}, {size.per_chip} pictures a chip at "
                "once: minutes for a large model"
            )
            kept = {"plan": asdict(_compile(request))}
            write_record(self._store.fs, place, kept)
        return Plan(**kept["plan"])

    def _key(self, request: Request) -> str:
        """By content: what the configs say, not where they lie."""
        folders = [folder for folder in (self._model, self._vae) if folder is not None]
        configs = {
            f"{number}/{path.relative_to(folder)}": json.loads(path.read_text(encoding="utf-8"))
            for number, folder in enumerate(folders)
            for path in sorted([*folder.rglob("*config.json"), *folder.glob("model_index.json")])
        }
        versions = {name: version(name) for name in PACKAGES} | {"libtpu": compiler_version()}
        asked = {**asdict(request), "model": None, "vae": None}
        return digest_json([VERSION, asked, configs, versions])


def _of_the_step(train: Train, size: Size) -> dict[str, Any]:
    """The settings that the compiled step depends on: of how long and how fast it is trained, it
    does not."""
    kept = train.model_dump(mode="json", include=set(OF_THE_STEP))
    kept["ema_decay"] = None if train.ema_decay is None else 0.0  # data: see jax/step.py
    batch = {"micro_batch_size": size.micro_batch_size, "global_batch_size": size.global_batch_size}
    return kept | batch


def _largest(measure: Callable[[Size], Plan], start: Size) -> Size | None:
    """The largest batch that fits; None if not even one picture a chip does.

    Between one that fits and one that does not, memory is taken to grow in a straight line; what
    that gives is compiled, until the two are neighbours.
    """
    hbm, fitting, failing = start.where.chip.hbm_bytes, 0, 0
    ask, before = start.per_chip, (0, 0)  # the batch asked for last, and its bytes
    while True:
        plan = measure(start.with_per_chip(ask))
        if _fits(plan, start.where):
            fitting = ask
        else:
            failing = ask
        if failing and failing - fitting == 1:
            return start.with_per_chip(fitting) if fitting else None
        low, high = fitting + 1, failing - 1 if failing else 8 * fitting
        if plan.fits or plan.total > hbm:  # else it is not known how much too large it is
            count, held = before if before[1] else (0, plan.arguments)
            slope = max((plan.total - held) / (ask - count), 1.0)
            guess = int(ask + (hbm - plan.total) // slope)
            before = (ask, plan.total)
        else:
            guess = (low + high) // 2
        ask = min(max(guess, low), high)


def _fits(plan: Plan, where: Slice) -> bool:
    return plan.fits and plan.total <= where.chip.hbm_bytes


def compiler_folder() -> Path | None:
    """Where libtpu is, if it has been set up."""
    folder = Path(sys.prefix + COMPILER)
    return folder if (folder / "libtpu").is_dir() else None


def compiler_version() -> str | None:
    """libtpu's, or None where there is none."""
    folder = compiler_folder()
    if folder is not None:
        return next(found.version for found in distributions(name="libtpu", path=[str(folder)]))
    try:
        return version("libtpu")
    except PackageNotFoundError:
        return None


def _compile(request: Request) -> Plan:
    """In a process of its own, which alone has libtpu on its path."""
    folder = compiler_folder()
    paths = [os.environ.get("PYTHONPATH", ""), "" if folder is None else str(folder)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    with tempfile.TemporaryDirectory(prefix="kiln-plan-") as scratch:
        path = Path(scratch) / "request.json"
        path.write_text(json.dumps(asdict(request)), encoding="utf-8")
        command = [sys.executable, "-P", "-m", "runtimes.jax.plan", str(path)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        last = "\n".join(done.stderr.splitlines()[-20:])
        raise PlanFailed(f"the step could not be compiled (exit code {done.returncode}): {last}")
    found = json.loads(done.stdout.splitlines()[-1])
    if "wrong_input" in found:
        raise WrongInput(found["wrong_input"])
    return Plan(**found)
