"""Jobs of a runtime's process, the JSON file that passes one to it, and the events it reports.

An event is a JSON line from a runtime's process to its parent, the stage.

| event      | fields                                                                           |
|------------|----------------------------------------------------------------------------------|
| start      | runtime, device, versions, step, total                                           |
| progress   | step, total, loss, learning_rate, grad_norm, images_per_second, data_wait (fraction |
|            | of the time), eta_seconds, memory_bytes; tflops (of one device) and mfu, or null |
| validation | step, loss, error (standard error, or null): the held-out loss; by_source        |
| checkpoint | step, path, seconds (total), blocked (seconds of paused training), bytes         |
| back       | step (restored after divergence), left_out (number of the skipped batch)         |
| sample     | step, path                                                                       |
| drawn      | done, total                                                                      |
| losses     | model, models: the held-out losses of model number `model` are computed          |
| warning    | message                                                                          |
| error      | message, wrong_input (bool), errno and file (of an OSError, or null), away (bool: |
|            | a store did not respond), traceback (or "")                                      |
| result     | the job's results, different for each kind of job                                |
"""

from __future__ import annotations

import json
import os
import threading
import time
from dataclasses import KW_ONLY, asdict, dataclass, field
from pathlib import Path
from typing import Any

from fsspec.core import url_to_fs

from artifacts.lock import Claim
from configs.errors import Refused


class HasModel:
    """A job or request with a pipeline, and perhaps a VAE that replaces the pipeline's own.

    `max_tokens` and `emphasis` are as the fields of `Base`.
    """

    model: str
    vae: str | None
    max_tokens: int
    emphasis: str


class HasNetwork(HasModel):
    """A job or request with a network to train."""

    denoiser_config: dict[str, Any] | None
    text_dtype: str | None
    control_start: str | None


@dataclass(frozen=True)
class TrainJob(HasNetwork):
    """Fine-tune `model` on `latents`; resume from `work` if it holds a checkpoint."""

    runtime: str
    model: str  # base pipeline: a local folder or a URL
    latents: str  # URL of the folder of the latents artifact with the training samples
    train: dict[str, Any]  # configs.settings.train.Train, dumped
    work: str  # URL of the folder for checkpoints and samples
    out: str  # URL of the folder for the trained weights (see train/training_loop.py)
    sample_prompts: tuple[str, ...] = ()
    sampler: dict[str, Any] = field(default_factory=dict)  # as GenerateJob.sampler
    vae: str | None = None  # VAE that replaces the pipeline's own in sample images
    denoiser_config: dict[str, Any] | None = None  # content of `train.denoiser_config`
    compiled: str | None = None  # URL of the compile cache; None disables it
    adapters: str | None = None  # URL of the LoRA file with the weights of step 0; None: new ones
    assistant: str | None = None  # URL of adapters, of scale 1, to merge into the denoiser
    holdout: str | None = None  # URL of the latents with the held-out samples; None: `latents`
    # Dtype of frozen text encoders in the step, as Encode.text_dtype; ignored if they are trained.
    text_dtype: str | None = None
    # Recipe.mixture: source -> weight, repeats, loss_weight, caption_dropout_rate, regularisation.
    mixture: dict[str, dict[str, Any]] = field(default_factory=dict)
    control_start: str | None = None  # folder of the ControlNet to start from; None: a new one
    sample_controls: tuple[str, ...] = ()  # URL of the control picture of each sample prompt
    claim: Claim | None = None  # of the lock under which `work` and `out` are written
    max_tokens: int = 77
    emphasis: str = "text"
    kind: str = "train"

    @property
    def has_prior(self) -> bool:
        """Whether samples of a source have the frozen base's prediction as their target."""
        return any(each["regularisation"] == "prior" for each in self.mixture.values())

    def check_lock(self) -> None:
        """Raise LockLost if another builder owns the folders; nothing may be written then."""
        if self.claim is not None:
            self.claim.check(url_to_fs(self.out, use_listings_cache=False)[0])


@dataclass(frozen=True)
class Drawing:
    """One model of a GenerateJob and its output folder."""

    out: str  # folder, local or a URL: 00000.png, 00001.png, ... and losses.json
    # Replaced components (unet, text_encoder, ...) -> folder, local or a URL.
    parts: dict[str, str] = field(default_factory=dict)
    lora: str | None = None  # safetensors file of LoRA adapters, in diffusers' format; also a URL


@dataclass(frozen=True)
class GenerateJob(HasModel):
    """Generate images of the same prompts and noise with each model; measure held-out losses."""

    runtime: str
    model: str  # pipeline: a local folder or a URL
    drawings: tuple[Drawing, ...]
    prompts: tuple[str, ...]  # one image per prompt, in order
    # seed, scheduler, num_inference_steps, guidance_scale, height and width (None: the model's
    # default), batch_size; aesthetic_score and negative_aesthetic_score for models with that input;
    # optionally true_cfg_scale, negative_prompt and eta (of DDIM, arXiv 2010.02502)
    sampler: dict[str, Any]
    device: str = "auto"
    dtype: str = "float32"
    _: KW_ONLY
    latents: str | None = None  # URL of the latents artifact with the held-out split
    text_dtype: str | None = None  # as TrainJob.text_dtype, for these latents
    # Of the held-out losses: samples, levels (of noise), seed, noise_offset; guidance_scale unless
    # it is 1; masked_loss if there is one.
    holdout: dict[str, Any] = field(default_factory=dict)
    vae: str | None = None  # VAE that replaces the pipeline's own: a local folder or a URL
    compiled: str | None = None  # as TrainJob.compiled
    flash_attention: bool = True  # as train.mindspore.flash_attention
    offload: bool = False  # whether layers are on the device only while they run
    #: Files of each prompt's reference pictures, in order; () if no prompt has any.
    references: tuple[tuple[str, ...], ...] = ()
    reference_pixels: int = 1024 * 1024  # their largest area, as encode.reference_pixels
    reference_step: int = 64  # the divisor of their sides, as encode.bucket_step
    first: int = 0  # number of the first image, which selects its noise
    fixed_noise: bool = False  # every batch starts from the first batch's noise
    # Metadata for each PNG, besides its prompt and noise number; None writes no metadata.
    words: dict[str, Any] | None = None
    hosts: int = 1  # that share batches and losses; NODE_RANK is the number of this one
    controls: tuple[str, ...] = ()  # URL of the control picture of each prompt; (): none
    max_tokens: int = 77
    emphasis: str = "text"
    kind: str = "generate"


@dataclass(frozen=True)
class EncodeJob(HasModel):
    """The encoders that a process loads and serves (see contract.PipelineEncoder)."""

    runtime: str
    model: str  # local folder of the pipeline
    vae: str | None = None  # local folder of a VAE that replaces the pipeline's own
    batch_size: int = 1  # maximum images per batch
    device: str = "auto"
    dtype: str = "float32"
    text: str = "embeddings"  # as `encode.text`
    text_precision: str | None = None  # int8, nf4; of the linear layers of the T5 or LLM
    offload: bool = False  # whether layers of text encoders are on the device only while they run
    compiled: str | None = None  # as TrainJob.compiled
    max_tokens: int = 77
    emphasis: str = "text"

    @property
    def embeds(self) -> bool:
        """Whether captions are embedded; else tokenizers are loaded, but no text encoder."""
        return self.text == "embeddings"


Job = TrainJob | GenerateJob


def write_job(job: Job, path: Path) -> None:
    """Write a job file for `python -P -m runtimes`."""
    path.write_text(json.dumps(asdict(job), indent=1), encoding="utf-8")


def read_job(path: Path) -> Job:
    """Read a file of `write_job`, or of a person: fields with a default may be absent.

    Raises Refused if it is no JSON object, or a field is absent or unknown.
    """
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
        if fields.get("kind", "train") == "train":
            claim = Claim(**fields["claim"]) if fields.get("claim") else None
            lists = {n: tuple(fields.get(n, ())) for n in ("sample_prompts", "sample_controls")}
            return TrainJob(**{**fields, **lists, "claim": claim})
        drawings = tuple(Drawing(**drawing) for drawing in fields["drawings"])
        lists = {"prompts": tuple(fields["prompts"]), "controls": tuple(fields.get("controls", ()))}
        lists["references"] = tuple(map(tuple, fields.get("references", ())))
        return GenerateJob(**{**fields, **lists, "drawings": drawings})
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        reason = f"no field {error}" if isinstance(error, KeyError) else error
        raise Refused(
            f"{path}: {reason}; runtimes/process/job.py has the fields of a job, such as TrainJob"
        ) from None


EVENT_FD = "KILN_EVENT_FD"


class Events:
    """Writes events to the file descriptor in KILN_EVENT_FD; without one, discards them."""

    def __init__(self) -> None:
        number = os.environ.get(EVENT_FD)
        self._stream = None if number is None else os.fdopen(int(number), "w", buffering=1)
        self._lock = threading.Lock()

    def emit(self, event: str, **fields: Any) -> None:
        """Write one event. A closed pipe is no error here: launcher.py detects a dead parent."""
        stream = self._stream  # another thread may clear the attribute
        if stream is None:
            return
        line = json.dumps({"event": event, "time": round(time.time(), 3), **fields})
        with self._lock:
            try:
                stream.write(line + "\n")
            except (BrokenPipeError, ValueError):
                self._stream = None


class SilentEvents(Events):
    """Discards all events, on every rank but 0."""

    def __init__(self) -> None:
        self._stream = None
