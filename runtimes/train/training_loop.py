"""The training loop, shared by all runtimes: resume, run the steps, write the result."""

from __future__ import annotations

from pydantic import ValidationError

from artifacts.latent_shards import Latents
from configs.errors import Refused
from configs.settings.train import Train
from runtimes.contract import Runtime
from runtimes.data.loader import BatchReader, Holdout, Loader, Prefetch, open_job_latents
from runtimes.families.extra_inputs import ExtraInputs
from runtimes.objective.noise_schedule import ResolutionShift
from runtimes.objective.training_objective import LatentScale, Objective
from runtimes.pipeline_folder.folder import Base, trained_config
from runtimes.process.job import Events, SilentEvents, TrainJob
from runtimes.process.launcher import Ranks, Stop
from runtimes.registry import open_runtime, prepare
from runtimes.train.trackers import Trackers, check_wandb, open_trackers
from runtimes.train.training_run import TrainingRun
from runtimes.train.validation import SEED

#: Held-out samples that a process keeps in memory: only its first measurement reads shards.
#: 64 samples of FLUX.1 at 1024 x 1024, with 512 tokens each, have 320 MiB.
HELD_OUT_BYTES = 2**30


def train(job: TrainJob, events: Events, stop: Stop) -> bool:
    """Run a training job until its last step or a stop request.

    Returns:
        True when the run is complete; False after a stop request, with all steps checkpointed.

    Raises:
        Refused: the job's settings, model or latents do not allow it.
        Failed: the loss is not finite, or far above its recent mean.
        CheckpointError, Away: the checkpoint at a stop request failed; later steps are lost.
    """
    settings = read_train_settings(job)
    latents = open_job_latents(job.latents)
    check_wandb(settings.wandb)
    base = Base.of(job)
    loader = make_loader(job, base, settings, latents)
    holdout = make_holdout(job, base, settings, latents)
    if not Ranks.here().first:
        events = SilentEvents()
    prepare(job)
    runtime = open_runtime(job.runtime)  # imports are slow, so cheap checks run first
    trackers = open_trackers(job.work, settings) if Ranks.here().first else Trackers([])
    done = False
    try:
        runtime.load(job, base)
        with TrainingRun(job, base, settings, runtime, holdout, trackers, events, stop) as run:
            run.resume()
            stop.defer()
            done = _train(run, runtime, loader, settings, stop)
    finally:
        trackers.close(done)
    return done


def _train(run: TrainingRun, runtime: Runtime, loader: Loader, settings: Train, stop: Stop) -> bool:
    """Train to the last step or an early stop; False after a stop request."""
    run.catch_up()
    while not run.done:  # once more after each rollback
        with loader.prefetch(
            run.step,
            settings.steps,
            settings.prefetch,
            lambda: stop.requested,
            run.skipped,
            runtime.put,
        ) as batches:
            if not _advance(run, runtime, batches, stop):
                run.checkpoint_and_exit()
                return False
    run.finish()
    return True


def _advance(run: TrainingRun, runtime: Runtime, batches: Prefetch, stop: Stop) -> bool:
    """Train until the run is done or a rollback; False after a stop request."""
    ready = iter(batches)
    while not run.done:
        batch = next(ready, None)  # None if this rank has a stop request
        if runtime.any_rank(stop.requested or batch is None) or batch is None:
            return False
        run.train_step(batch)
        if not run.after_step(batches.waited):
            break
    return True


def read_train_settings(job: TrainJob) -> Train:
    """The job's validated train settings. Raises Refused, naming the first wrong setting."""
    try:
        settings = Train(**job.train)
    except ValidationError as error:
        first = error.errors()[0]
        name = ".".join(map(str, ("train", *first["loc"])))
        raise Refused(f"{name}: {first['msg']}") from None
    if (settings.denoiser_config is None) != (job.denoiser_config is None):
        raise Refused("train.denoiser_config: the job must contain its content")
    rule = settings.best_checkpoint
    if rule is not None and rule.by_samples and not job.sample_prompts:
        raise Refused(f"train.best_checkpoint: metric {rule.metric} requires sample prompts")
    return settings


def make_loader(job: TrainJob, base: Base, settings: Train, latents: Latents) -> Loader:
    """This rank's loader of training batches for a job. Raises Refused."""
    ranks = Ranks.here()
    return Loader(
        _reader(job, base, settings, latents),
        batch_size=settings.global_batch_size,
        seed=settings.seed,
        window=settings.shuffle_window,
        rank=ranks.rank,
        world=ranks.world,
    )


def make_holdout(job: TrainJob, base: Base, settings: Train, latents: Latents) -> Holdout | None:
    """The held-out batches for the held-out loss; None if it is off.

    Args:
        latents: those to train on; `job.holdout` replaces them.

    Raises:
        Refused: the latents have no held-out samples.
    """
    if not settings.holdout_loss.every_n_steps:
        return None
    if job.holdout is not None:
        latents = open_job_latents(job.holdout)
    return Holdout(
        _reader(job, base, settings, latents, held_out=True),
        samples=settings.holdout_loss.samples,
        draws=settings.holdout_loss.draws,
        # A micro-batch fits in memory during training.
        batch_size=settings.micro_batch(Ranks.here().world),
    )


def _reader(
    job: TrainJob, base: Base, settings: Train, latents: Latents, *, held_out: bool = False
) -> BatchReader:
    family = base.family
    config = trained_config(base.denoiser, settings, job.denoiser_config)
    objective = Objective.of(
        settings,
        base.schedule(settings),
        LatentScale.from_info(latents.info, draws=family.draws_latents),
        ResolutionShift.from_config(base.scheduler, family.latent_multiple(config)),
    )
    return BatchReader(
        latents,
        family,
        objective.held_out(SEED) if held_out else objective,
        text_encoders=settings.train_text_encoder or job.text_dtype is not None,
        extras=ExtraInputs.from_config(config),
        cache_bytes=settings.cache_bytes,
        guidance_scale=settings.guidance_scale,
        keep_bytes=HELD_OUT_BYTES if held_out else 0,
    )
