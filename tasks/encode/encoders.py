"""The encoders of the pool's processes, and encoders in the store, for remote workers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from artifacts.models import IGNORED, fetch_model, files_below, put_model
from artifacts.store import Store
from configs.settings.data import Captions
from runtimes.pipeline_folder.folder import Base
from runtimes.process.job import EncodeJob
from runtimes.process.launcher import count_cores
from runtimes.registry import open_encoder
from tasks.devices.processes import Facts, Worker
from tasks.encode.captions import encoded_samples
from tasks.encode.crop_to_bucket import STAGE, TransformSettings
from tasks.encode.near_duplicates import SUFFIX
from tasks.encode.prompts import encode_prompts
from tasks.encode.references import ReferenceSettings, encode_reference_tar
from tasks.encode.shard import ShardEncoder
from tasks.pictures import PictureShard

PIPELINE = "pipeline"
VAE = "vae"  # subfolders of the copy


@dataclass(frozen=True)
class EncodersInStore:
    """Where the encoders of a job are, for workers without the flow's folders."""

    url: str
    digest: str  # of digest_encoders

    def fetched(self, job: EncodeJob) -> EncodeJob:
        """The job with the folders of this machine's copy. Raises Refused."""
        copy = fetch_model(
            self.url, self.digest, lambda folder: _opened(folder, job).digest_encoders()
        )
        return replace(job, **_opened(copy, job).job_fields)


@dataclass(frozen=True)
class EncodingPlan:
    """The encoders and their settings, as devices.processes.Plan."""

    job: EncodeJob
    settings: TransformSettings
    decoders: int = 1  # threads that decode pictures, per device
    copy: EncodersInStore | None = None  # for workers without the folders of `job`
    rule: dict[str, Any] | None = None  # of the captions, see PictureShard.read
    captions: Captions | None = None  # their changes
    references: ReferenceSettings | None = None  # None: targets have none

    stage = STAGE

    @property
    def runtime(self) -> str:
        return self.job.runtime

    @property
    def device(self) -> str:
        return self.job.device

    def fetched(self) -> EncodingPlan:
        """The plan with the encoders of this machine. Raises Refused."""
        return self if self.copy is None else replace(self, job=self.copy.fetched(self.job))

    def on(self, device: str, processes: int) -> EncodingPlan:
        """The plan of one of several processes of this machine."""
        decoders = max(1, count_cores() // processes)
        return replace(self, job=replace(self.job, device=device), decoders=decoders)

    def open(self) -> Worker:
        """Load the encoders in this process. Raises Refused."""
        job = self.job
        encoder = open_encoder(self.job)
        arguments = (encoder, self.settings, job.batch_size, self.decoders)
        encodes = ShardEncoder(*arguments, embeds=job.embeds)
        targets = partial(encode_tar, encodes, self.rule, self.settings.holdout, self.captions)
        about = (encodes.encoder, encodes.device)
        prompts = partial(encode_prompts, *about, self.settings.max_pixels)
        if self.references is None:
            return partial(_encode, targets, {"prompts": prompts})
        references = partial(encode_reference_tar, *about, self.references)
        return partial(_encode, targets, {"prompts": prompts, "references": references})


def _encode(
    targets: Worker, others: Mapping[str, Worker], request: dict[str, Any], folder: str
) -> Facts:
    """Encode an image shard of targets or of references, or prompts."""
    named = (worker for name, worker in others.items() if name in request)
    return next(named, targets)(request, folder)


def encode_request(
    key: str, pictures: PictureShard, thumbnails: str | None = None
) -> dict[str, Any]:
    """What `encode_tar` needs.

    Args:
        key: of the latent shard.
        thumbnails: key of the thumbnail shard; None: it is not wanted.
    """
    about = {"key": key, "tar": pictures.tar, "thumbnails": thumbnails}
    return {**about, "pictures": asdict(pictures)}


def encode_tar(
    encoder: ShardEncoder,
    rule: dict[str, Any] | None,
    holdout: float,
    captions: Captions | None,
    request: dict[str, Any],
    folder: str,
) -> Facts:
    """Encode pictures of an image shard to a latent shard and their thumbnails, in `folder`.

    Args:
        rule: of the captions, see PictureShard.read.
        holdout: fraction of the pictures in the held-out split.
        captions: changes of the captions; None: none.

    Raises:
        Damaged: the tar has another sha256.
        Refused: see ShardEncoder.encode.
    """
    path = Path(folder, f"{request['key']}.safetensors")
    pictures = PictureShard(**request["pictures"])
    facts = encoder.encode(encoded_samples(pictures, rule, holdout, captions), path)
    shards: Facts = {request["key"]: facts}
    thumbnails = path.with_suffix(SUFFIX)
    if request["thumbnails"] is None:
        thumbnails.unlink()
    else:
        thumbnails.rename(Path(folder, f"{request['thumbnails']}{SUFFIX}"))
        shards[request["thumbnails"]] = {}
    return shards


def put_encoders(store: Store, base: Base) -> EncodersInStore:
    """Copy the VAE and the text encoders to the store, unless they are there."""
    digest = base.digest_encoders()
    return EncodersInStore(put_model(store, digest, dict(_files(base))), digest)


def _files(base: Base) -> Iterator[tuple[str, Path]]:
    """(path in the copy, file) of all files that an encoder reads."""
    for name in ("model_index.json", f"{base.family.denoiser}/config.json"):
        yield f"{PIPELINE}/{name}", base.folder / name
    for part in base.text_parts:
        yield from _below(base.part(part), f"{PIPELINE}/{part}")
    yield from _below(base.vae, f"{PIPELINE}/vae" if base.vae_folder is None else VAE)


def _below(folder: Path, name: str) -> Iterator[tuple[str, Path]]:
    for file in files_below(folder):
        relative = file.relative_to(folder)
        if not IGNORED & set(relative.parts):
            yield f"{name}/{relative.as_posix()}", file


def _opened(copy: Path, job: EncodeJob) -> Base:
    vae = copy / VAE
    return Base.of(replace(job, model=str(copy / PIPELINE), vae=str(vae) if vae.is_dir() else None))
