"""The suite's world: a few real pictures, encoded by each tiny model as the encode stage does."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import chips
import numpy as np
import pytest
import torch
from driver_process import DriverProcess
from numpy.typing import NDArray
from picture_bytes import encode_picture
from PIL import Image
from shortest_recipe import shortest_recipe
from sklearn.datasets import load_digits

from artifacts.image_shards import Sample, write_tar
from artifacts.latent_shards import INFO, MIXTURE
from artifacts.records import digest_bytes
from artifacts.store import KeyParts, Store
from configs.settings.train import Train
from runtimes.families import FAMILIES
from runtimes.pipeline_folder.folder import Base
from runtimes.process.job import EncodeJob, Job, TrainJob, write_job
from runtimes.registry import interpreter, open_encoder
from runtimes.torch_models.vae_text_encoders import Embeds
from tasks import child_process
from tasks.encode.stage import EncodeStage
from tasks.progress import Progress

PICTURES = 60
#: Most tokens of a drawn caption. The pictures' own captions are all equally long.
LONGEST = 48
MakeJob = Callable[..., TrainJob]
MakeOnce = Callable[[str, Callable[[Path], None]], Path]


class Subject:
    """A runtime, or a variant of one, and a process of it that does job after job."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name, self.on = name, chips.VARIANTS[name]
        self._folder, self._process, self._jobs = folder, None, 0

    def run(self, job: Job) -> int | None:
        """Do a job in the process that is open; the step that training began at."""
        return _step_of_start(self._do(job, 0))

    def refused(self, job: Job) -> str:
        """What the process that is open says of a job that is wrong input."""
        (error,) = [event for event in self._do(job, 2) if event["event"] == "error"]
        assert error["wrong_input"]
        return str(error["message"])

    def rows(self, job: TrainJob, which: Sequence[str]) -> list[float]:
        """What the driver's `rows` returns, in the process that is open."""
        return list(self._call("rows", job, which))

    def _do(self, job: Job, code: int) -> list[dict[str, Any]]:
        """The events of a job that ends with an exit code."""
        done = self._call("do", job)
        assert done["code"] == code, (done["events"], self._process and self._process.log_end())
        return list(done["events"])

    def _call(self, name: str, job: Job, *arguments: Any) -> Any:
        """What a function of the driver returns for a job."""
        if self._process is None:
            driver, python = Path(__file__).with_name("job_driver.py"), interpreter(self.on.runtime)
            with chips.standing_in(self.name):
                self._process = DriverProcess(driver, python, self._folder, fork=False)
        self._jobs += 1
        path = self._folder / f"job-{self._jobs}.json"
        write_job(job, path)
        return self._process.call(name, str(path), *arguments)

    def run_alone(self, job: Job) -> int | None:
        """The same as a stage does it: in a process of its own. Raises what run_job does."""
        events: list[dict[str, Any]] = []
        with chips.standing_in(self.name):
            child_process.run_job(job, events.append)
        return _step_of_start(events)

    def close(self) -> None:
        if self._process is not None:
            self._process.close()


def _step_of_start(events: list[dict[str, Any]]) -> int | None:
    return next((event["step"] for event in events if event["event"] == "start"), None)


@pytest.fixture(autouse=True)
def _one_thread(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Models this small gain nothing from more."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def _pictures(path: Path) -> None:
    """Handwritten digits, captioned, as an image shard."""
    digits = load_digits()
    samples = []
    for number in range(PICTURES):
        grey = Image.fromarray((digits.images[number] * 15).astype(np.uint8))
        caption = f"the digit {digits.target[number]}"
        picture = encode_picture(grey.resize((32, 32)).convert("RGB"))
        meta = {"aesthetic_score": 4 + number % 7 / 2, "sha256": digest_bytes(picture)}
        samples.append(Sample(f"{number:03}", picture, "png", (caption,), meta))
    write_tar(path, samples)


class Drawn:
    """An encoder whose numbers are drawn, each from what it encodes: see contract.PipelineEncoder.

    Latents are stored in bfloat16. Of what a model computes, some lies so near the middle of two
    such numbers that processors round it differently; golden.json holds on all of them.
    """

    def __init__(self, job: EncodeJob) -> None:
        self._real = open_encoder(job)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def images(self, pixels: NDArray[np.float32]) -> tuple[NDArray[Any], NDArray[Any]]:
        shape = (2, *self._real.images(pixels[:1])[0].shape[1:])
        moments = np.stack([_draws(picture.tobytes(), shape) for picture in pixels])
        return moments[:, 0], moments[:, 1] - 6

    def texts(self, captions: Sequence[str]) -> tuple[Embeds, NDArray[Any] | None]:
        states, pooled = self._real.texts(captions[:1])
        seeds = [caption.encode() for caption in captions]
        if self._real.family.varying_lengths:
            width = states[0].shape[1]
            lengths = [1 + _number(seed + b" length") % LONGEST for seed in seeds]
            rows = [_draws(seed, (n, width)) for seed, n in zip(seeds, lengths, strict=True)]
            return rows, None
        drawn = np.stack([_draws(seed, states.shape[1:]) for seed in seeds])
        if pooled is None:
            return drawn, None
        return drawn, np.stack([_draws(seed + b" pooled", pooled.shape[1:]) for seed in seeds])


def _number(seed: bytes) -> int:
    return int.from_bytes(hashlib.sha256(seed).digest())


def _draws(seed: bytes, shape: tuple[int, ...]) -> NDArray[np.float32]:
    rng = np.random.Generator(np.random.Philox(_number(seed)))
    return rng.standard_normal(shape, np.float32)


def _encode(folder: Path, model: Path) -> str:
    """URL of the latents of the pictures, as large as those of `model`."""
    recipe = shortest_recipe(
        store=str(folder / "store"),
        model={"path": str(model)},
        source={"kind": "folder", "path": ".", "aesthetic_column": "score"},
        encode={
            "resolution": 32,
            "holdout": 0.2,
            "leave_out_copies": False,
            "masks": 3,
            "device": "cpu",
        },
        train={"inpainting": True, "aesthetic_score": True},
    )
    store = Store(recipe.store)
    _pictures(folder / "shard.tar")
    images = store.draft(KeyParts("download", 1, {}, {}))
    shard = {".tar": str(folder / "shard.tar")}
    images.add_shard(store.commit_shard("download", "0" * 64, shard, {"samples": PICTURES}))
    draft = store.draft(KeyParts("encode", 1, {}, {}))
    found = images.commit({}, {})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tasks.encode.encoders.open_encoder", Drawn)
        stage = EncodeStage(recipe, found, Base.open(model))
        draft.commit(stage.build(draft, Progress("encode")), {})
    return draft.uri


@pytest.fixture(scope="session")
def models(tiny_model: Callable[[str], Path]) -> dict[str, Path]:
    """A tiny pipeline of each family."""
    return {family: tiny_model(f"tiny-{family.replace('_', '-')}") for family in FAMILIES}


@pytest.fixture(scope="session")
def latents(models: dict[str, Path], once: MakeOnce) -> Callable[[str], str]:
    """`latents(family)`: URL of the encoded pictures."""

    def url(family: str) -> str:
        def encoded(folder: Path) -> None:
            (folder / "url").write_text(_encode(folder, models[family]))

        return (once(f"conformance-latents-{family}", encoded) / "url").read_text()

    return url


@pytest.fixture(scope="session")
def mixture(latents: Callable[[str], str], once: MakeOnce) -> str:
    """URL of a mixture of SDXL's latents, whose sources `old` and `subject` both have all."""

    def named(folder: Path) -> None:
        store, _, key = latents("sdxl").rsplit("/", 2)
        draft = Store(store).draft(KeyParts("encode", 1, {"mixture": key}, {}))
        draft.write(INFO, Path(latents("sdxl"), INFO).read_bytes())
        draft.write(MIXTURE, json.dumps({"old": key, "subject": key}).encode())
        (folder / "url").write_text(draft.commit({}, {}).uri)

    return (once("conformance-mixture", named) / "url").read_text()


@pytest.fixture(scope="session")
def open_subject(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Subject]]:
    """`open_subject(name)`: one is open at a time, as the tests of one follow each other."""
    opened: list[Subject] = []

    def subject(name: str) -> Subject:
        if not opened or opened[-1].name != name:
            for before in opened:
                before.close()
            opened[:] = [Subject(name, tmp_path_factory.mktemp(name))]
        return opened[-1]

    yield subject
    for last in opened:
        last.close()


@pytest.fixture
def runtime(request: pytest.FixtureRequest, open_subject: Callable[[str], Subject]) -> Subject:
    """The runtime, or the variant of one, that a test is about: a name of chips.VARIANTS."""
    chips.require(request.param)
    return open_subject(request.param)


@pytest.fixture
def make_job(models: dict[str, Path], latents: Callable[[str], str], tmp_path: Path) -> MakeJob:
    """`make_job(variant, family, name, **settings)`: a train job with much of what can be set."""

    def make(variant: str, family: str = "sdxl", name: str = "run", **settings: Any) -> TrainJob:
        on = chips.VARIANTS[variant]
        common = {
            "steps": 20,
            "global_batch_size": 8,
            "learning_rate": 1e-3,
            "lr_scheduler": "cosine",
            "lr_warmup_steps": 4,
            "weight_decay": 0.02,
            "max_grad_norm": 0.5,
            "caption_dropout_rate": 0.2,
            "ema_decay": 0.9,
            "seed": 3,
            "device": on.device,
            **on.settings,
            "checkpointing_steps": 8,
            "checkpoints_total_limit": 9,
        }
        return TrainJob(
            runtime=on.runtime,
            model=str(models[family]),
            latents=latents(family),
            train=Train(**{**common, **settings}).model_dump(mode="json"),
            work=str(tmp_path / name),
            out=str(tmp_path / name),
        )

    return make
