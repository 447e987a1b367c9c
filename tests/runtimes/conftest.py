"""Latents artifacts of random numbers, and jobs over the tiny models."""

import fcntl
import json
import os
import subprocess
import sys
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from artifacts.latent_shards import LatentSample, Texts, to_bfloat16, write_latent_shard
from artifacts.references import (
    INDEX,
    SUFFIX,
    ReferencePlace,
    Targets,
    encode_index,
    write_reference_shard,
)
from artifacts.store import Draft, KeyParts, Store
from configs.settings.train import Train
from runtimes.families import family_named
from runtimes.pipeline_folder.folder import Base
from runtimes.process.job import EVENT_FD, TrainJob, write_job
from runtimes.torch_models.vae_text_encoders import Encoder

TOKENS, PROMPT_DIM, POOLED_DIM = 6, 64, 24
INFO = {
    "family": "sdxl",
    "latent_channels": 4,
    "vae_scale_factor": 4,
    "size_step": 4,
    "scaling_factor": 0.5,
    "shift_factor": 0.0,
    "latents_mean": None,
    "latents_std": None,
    "empty_prompt": "zeros",
    "tokens": TOKENS,
    "caption_tokens": TOKENS,
    "prompt_dim": PROMPT_DIM,
    "pooled_dim": POOLED_DIM,
}
Groups = Mapping[str, int]


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Models this small gain nothing from more, and lose much on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def make_sample(
    rng: np.random.Generator, height: int, width: int, captions: int, channels: int = 4
) -> LatentSample:
    return LatentSample(
        mean=rng.normal(size=(channels, height, width)).astype(np.float32),
        logvar=rng.normal(-4, 1, size=(channels, height, width)).astype(np.float32),
        id=rng.bytes(32),
        original_size=(int(rng.integers(32, 4001)), int(rng.integers(32, 4001))),
        crop_top_left=(int(rng.integers(9)), int(rng.integers(9))),
        target_size=(height * 4, width * 4),
        flip=False,
        caption_rows=tuple(rng.permutation(captions)[: rng.integers(1, 3)] + 1),
    )


def _of_varying_lengths(embeds: Any) -> list[Any]:
    """Embeddings [K, T, D] cut to the last one's half, ..., up to T."""
    lengths = np.linspace(len(embeds[0]) // 8, len(embeds[0]), len(embeds)).astype(int)
    return [rows[:length] for rows, length in zip(embeds, lengths, strict=True)]


def _write_latents(
    url: str,
    shards: Sequence[Groups],
    scratch: Path,
    texts: Texts | None = None,
    loss_masks: Sequence[Any] = (),
    first: int = 0,
    references: Sequence[int] = (),
    **info: Any,
) -> str:
    """An encode artifact below the store at `url`, with `shards` as groups -> count.

    Args:
        texts: of every shard; None: of random numbers.
        loss_masks: of the first samples of each group.
        first: number of the first shard, which selects its random numbers and its key.
        references: how many references the samples of a group have, by turns.
    """
    store = Store(url)
    info = {**INFO, **info}
    draft = store.draft(KeyParts("encode", 1, {"info": info, "shards": list(shards)}, {}))
    for number, groups in enumerate(shards, first):
        rng = np.random.default_rng(number)
        samples = {
            group: [
                make_sample(
                    rng, *map(int, group.split("/")[1].split("x")), 5, info["latent_channels"]
                )
                for _ in range(count)
            ]
            for group, count in groups.items()
        }
        for rows in samples.values():
            rows[: len(loss_masks)] = [
                replace(row, loss_mask=mask) for row, mask in zip(rows, loss_masks, strict=False)
            ]
            if info.get("control"):
                rows[:] = [replace(row, control=_random_control(row, info)) for row in rows]
        path = scratch / "shard.safetensors"
        write_latent_shard(path, samples, _random_texts(rng, info) if texts is None else texts)
        key = f"{number:064x}"
        meta = {"groups": dict(groups), "bad": 0}
        draft.add_shard(store.commit_shard("encode", key, {".safetensors": str(path)}, meta))
    if references:
        _write_references(draft, shards, references, info["latent_channels"], scratch)
    draft.write("latents.json", json.dumps(info).encode())
    return draft.commit({}, {}).uri


#: (h, w) of the first, second and third reference of each sample.
REFERENCE_SIZES = ((4, 8), (8, 6), (6, 6))


def _write_references(
    draft: Draft, shards: Sequence[Groups], counts: Sequence[int], channels: int, scratch: Path
) -> None:
    """Two references of each size in one shard, and the index by which samples have one of each."""
    rng = np.random.default_rng(11)
    shapes = [(channels, *size) for size in REFERENCE_SIZES for _ in range(2)]
    means = [to_bfloat16(rng.normal(size=shape).astype(np.float32)) for shape in shapes]
    path = scratch / "references"
    write_reference_shard(path, [(rng.bytes(32), mean) for mean in means])
    draft.add_shard(draft.store.commit_shard("encode", "f" * 64, {SUFFIX: str(path)}, {}))
    names = [f"{height}x{width}" for height, width in REFERENCE_SIZES]
    places = [ReferencePlace(0, name, row) for name in names for row in range(2)]

    def of_sample(row: int) -> list[int]:
        return [
            2 * number + (row // len(counts)) % 2 for number in range(counts[row % len(counts)])
        ]

    targets = {
        f"{shard:064x}": {
            group: Targets.from_lists(map(of_sample, range(count)))
            for group, count in groups.items()
        }
        for shard, groups in enumerate(shards)
    }
    draft.write(INDEX, encode_index(places, targets))


def _random_control(sample: LatentSample, info: dict[str, Any]) -> Any:
    rng = np.random.default_rng(sample.original_size)
    if family_named(info["family"]).control == "latents":
        return rng.normal(size=sample.mean.shape).astype(np.float32)
    return rng.integers(256, size=(3, *sample.target_size)).astype(np.uint8)


def _write_mixture(url: str, sources: Mapping[str, Sequence[Groups]], scratch: Path) -> str:
    """The encode artifact of a mixture: source -> its shards, as groups -> count."""
    keys = {}
    first = 0
    for name, shards in sources.items():
        latents = _write_latents(url, shards, scratch, first=first)
        keys[name] = latents.rpartition("/")[2]
        first += len(shards)
    draft = Store(url).draft(KeyParts("encode", 1, {"sources": keys}, {}))
    draft.write("latents.json", json.dumps(INFO).encode())
    draft.write("mixture.json", json.dumps(keys).encode())
    return draft.commit({}, {}).uri


def _random_texts(rng: np.random.Generator, info: dict[str, Any]) -> Texts:
    family = family_named(info["family"])
    embeds = rng.normal(size=(6, info["tokens"], info["prompt_dim"])).astype(np.float32)
    return Texts(
        _of_varying_lengths(embeds) if family.varying_lengths else embeds,
        rng.normal(size=(6, info["pooled_dim"])).astype(np.float32) if info["pooled_dim"] else None,
        rng.integers(512, size=(6, len(family.clip), TOKENS)),
        family.varying_lengths,
    )


WriteLatents = Callable[..., str]


@pytest.fixture
def write_latents(tmp_path: Path) -> WriteLatents:
    """`write_latents(url, shards, **info)` writes an encode artifact and returns its URL."""
    return lambda url, shards, **info: _write_latents(str(url), shards, tmp_path, **info)


@pytest.fixture
def write_mixture(tmp_path: Path) -> Callable[[Mapping[str, Sequence[Groups]]], str]:
    """`write_mixture(sources)` writes the encode artifact of a mixture and returns its URL."""
    return lambda sources: _write_mixture(str(tmp_path / "mixture"), sources, tmp_path)


#: Captions of different lengths, one longer than an encoder reads; the first is the empty one.
CAPTIONS = ("", "a cat", "Déjà vu, 123 & more", "a dog on a mat", "long " * 60, "red")
#: `(model, dtype)` to a latents artifact with embeddings, and one with token ids alone.
BothForms = Callable[..., tuple[str, str]]


@pytest.fixture
def both_forms(tmp_path: Path, write_latents: WriteLatents) -> BothForms:
    """Writes latents with CAPTIONS in both forms of `encode.text`."""

    def write(model: Path, dtype: str = "float32") -> tuple[str, str]:
        encoder = Encoder(Base.open(model), device="cpu", dtype=dtype)
        (embeds, pooled), ids = encoder.texts(CAPTIONS), encoder.input_ids(CAPTIONS)
        forms = (Texts(embeds, pooled, ids), {}), (Texts(None, None, ids), {"text_dtype": dtype})
        groups = [{"train/8x8": 9, "holdout/8x8": 3}]
        embedded, tokens = (
            write_latents(tmp_path / f"form{n}", groups, texts=texts, **encoder.info, **more)
            for n, (texts, more) in enumerate(forms)
        )
        return embedded, tokens

    return write


@pytest.fixture(scope="session")
def latents_url(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Three shards, two buckets, some held out."""
    folder = tmp_path_factory.mktemp("latents")
    shards = [
        {"train/8x8": 9, "train/4x12": 3, "holdout/8x8": 2},
        {"train/8x8": 5, "holdout/4x12": 2},
        {"train/8x8": 7, "train/4x12": 5, "holdout/8x8": 1},
    ]
    return _write_latents(str(folder / "store"), shards, folder)


MakeJob = Callable[..., TrainJob]


@pytest.fixture
def make_job(tiny_sdxl: Path, latents_url: str, tmp_path: Path) -> MakeJob:
    """Builds a train job; keywords are train settings, or fields of the job."""

    def make(name: str = "run", **settings: Any) -> TrainJob:
        names = ("model", "latents", "runtime", "text_dtype", "mixture")
        fields = {key: settings.pop(key) for key in names if key in settings}
        small = {"steps": 6, "global_batch_size": 4, "learning_rate": 1e-3, "device": "cpu"}
        job = TrainJob(
            runtime="torch",
            model=str(tiny_sdxl),
            latents=latents_url,
            train=Train(**{**small, **settings}).model_dump(mode="json"),
            work=str(tmp_path / name / "work"),
            out=str(tmp_path / name / "out"),
        )
        return replace(job, **fields)

    return make


class Child:
    """A runtime's process, started as a stage starts it; it is killed when it takes too long.

    Args:
        program: what is run, before the path of the job's file.
        pipe: bytes of events that it may be ahead of us: it waits until we have read them.
        more: variables of its environment.
    """

    def __init__(
        self,
        job: TrainJob,
        folder: Path,
        program: Sequence[str] = ("-P", "-m", "runtimes"),
        pipe: int = 4096,
        **more: str,
    ) -> None:
        path = folder / f"{uuid.uuid4().hex}.json"
        write_job(job, path)
        events, write = os.pipe()
        fcntl.fcntl(write, fcntl.F_SETPIPE_SZ, pipe)
        self.process = subprocess.Popen(
            [sys.executable, *program, str(path)],
            env={
                **os.environ,
                EVENT_FD: str(write),
                "OMP_NUM_THREADS": str(torch.get_num_threads()),
                **more,
            },
            pass_fds=(write,),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        self.deadline = threading.Timer(300, self.process.kill)
        self.deadline.start()
        os.close(write)
        self.stream = os.fdopen(events)

    def events(self) -> Iterator[dict[str, Any]]:
        """What it says from now on."""
        for line in self.stream:
            yield json.loads(line)

    def step_of_first(self, kind: str) -> int:
        """The step that the first event of a kind from now on tells of."""
        return next(event["step"] for event in self.events() if event["event"] == kind)

    def end(self) -> int:
        """Its exit code, once it has ended by itself."""
        for _ in self.stream:
            pass
        try:
            return self.process.wait(60)
        finally:
            self.deadline.cancel()


StartJob = Callable[..., Child]


@pytest.fixture
def start_job(tmp_path: Path) -> Iterator[StartJob]:
    """Starts a job in a process of its own; none is left behind."""
    children: list[Child] = []

    def start(job: TrainJob, *arguments: Any, **more: Any) -> Child:
        children.append(Child(job, tmp_path, *arguments, **more))
        return children[-1]

    yield start
    for child in children:
        child.deadline.cancel()
        child.process.kill()
        child.process.wait()
