"""Remedies of errors, for docs/troubleshooting.md: of frequent messages, and of each class."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Frequent:
    """A message that many people meet.

    Attributes:
        text: a part of the message, without its variable words.
        foreign: whether another program writes it; it is then not in our code.
    """

    text: str
    cause: str
    remedy: str
    foreign: bool = False


FREQUENT = (
    Frequent(
        "CUDA out of memory",
        "A batch needs more memory than the GPU has.",
        "`kiln plan RECIPE --gpu 24GB` names the settings that fit. `train.micro_batch_size` and "
        "`train.gradient_checkpointing` may change in the middle of a run: it resumes.",
        foreign=True,
    ),
    Frequent(
        "GiB for tensors",
        "`kiln plan` or `kiln run` found the recipe too large for the GPU or slice.",
        "Add the advised settings ([gpu.md](gpu.md#fit-a-recipe-to-a-card)).",
    ),
    Frequent(
        "the gate rejected the model",
        "A rule of `publish.gate` failed. The run ends with exit code 3; its stages are kept.",
        "Read the metrics, change training or the rule, and run again: only what changed is built. "
        "`--force REASON` publishes this model anyway.",
    ),
    Frequent(
        "is not measured",
        "A rule of `publish.gate` names a metric that the recipe does not compute.",
        "The message lists the metrics. Distances need two held-out pictures (`encode.holdout`) "
        "and two compared ones.",
    ),
    Frequent(
        "unknown setting",
        "The setting does not exist, or has another name here.",
        "Take the suggested name. [settings.md](settings.md) has all, "
        "[coming-from.md](coming-from.md) those of other tools.",
    ),
    Frequent(
        "Prefect cannot read it",
        "Prefect reads `.env`, `prefect.toml` and `pyproject.toml` of the folder where a command "
        "starts, and its profile.",
        "Correct or remove the file, or start in another folder.",
    ),
    Frequent(
        "is building it",
        "This is not an error. Another run builds the same artifact; this one waits or helps.",
        "Wait. The lock of a killed builder expires at once on the same host, and after 30 seconds "
        "elsewhere.",
    ),
    Frequent(
        "another process took the lock over",
        "This process was paused or lost its store for more than 30 seconds.",
        "Run again: nothing is lost. Two runs did not write the same artifact.",
    ),
    Frequent(
        "no space left",
        "The disk of the store, or the one that the message names, is full.",
        "Free space: `kiln gc` lists what nobody needs, `kiln gc --delete` deletes it. The run "
        "resumes.",
    ),
    Frequent(
        "can open no more files",
        "A process, or the machine, has as many files and connections as its limit allows.",
        "Raise the limit that the message names, or lower `download.max_connections`. No row is "
        "lost: the run resumes.",
    ),
    Frequent(
        "has too little memory",
        "A picture could not be decoded or fetched for want of memory; it is not recorded as bad.",
        "Free memory, raise the limit (`ulimit -v`, or the container's), or have fewer processes "
        "run on the machine at once. No finished shard is lost: the run resumes.",
    ),
    Frequent(
        "no Prefect server answers",
        "`PREFECT_API_URL` is set, and its server is down.",
        "Start it (`make ui`), or unset the variable: a run then starts a server of its own.",
    ),
    Frequent(
        "no such folder",
        "`model.path` (or `evaluate.clip`) is neither a folder nor a model of the hub.",
        "Correct the path. A gated model needs an accepted licence, and a token in `HF_TOKEN`.",
    ),
    Frequent(
        "is not on this machine",
        "The recipe names a device that the runtime does not see.",
        "Run `kiln doctor`. Set `train.device=auto`, or mend the driver.",
    ),
    Frequent(
        "needs its own environment",
        "The runtime's packages are in an environment that was not made.",
        "Run the command of the message, such as `make setup-xla`.",
    ),
    Frequent(
        "rows failed (",
        "Many URLs are gone, refused, or no pictures.",
        "Look at the outcomes of the download stage. Raise `download.max_failed` for an old list.",
    ),
    Frequent(
        "is not finite",
        "Training diverged: the loss or the gradient is NaN or infinite.",
        "Lower `train.learning_rate`, or add warm-up. `train.divergence.action=skip` skips bad "
        "batches.",
    ),
    Frequent(
        "samples are bad",
        "The VAE gives NaN, mostly in half precision, or pictures are damaged.",
        "For SDXL set `model.vae` to a VAE for half precision, or `encode.dtype=float32`.",
    ),
    Frequent(
        "the runtime's process was stopped",
        "Somebody, or the system, ended the training process. It left a checkpoint.",
        "Run again: the run resumes.",
    ),
    Frequent(
        "was killed by",
        "The system killed the training process. SIGKILL mostly means: out of host memory.",
        "Free memory, lower `train.prefetch` or `encode.batch_size`, and run again: it resumes.",
    ),
    Frequent(
        "it will be rebuilt",
        "A file of the store is damaged or was deleted.",
        "Nothing to do: the stage is built again. `kiln verify` checks the whole store.",
    ),
    Frequent(
        "was written by a newer version",
        "Two versions of Kilnworks use one store.",
        "Update the older checkout.",
    ),
    Frequent(
        "progress is not shown in Prefect",
        "The Prefect server did not answer for a moment.",
        "Nothing to do: the run goes on.",
    ),
)

#: Class of an error -> what to do about it. Its docstring is the cause.
REMEDIES = {
    "RecipeError": "Correct the setting that the message names. Nothing was started.",
    "ValueError": "Correct the setting before the message. Nothing was started.",
    "WrongInput": "Correct the setting, path or device of the message. Finished stages are kept.",
    "BeamOptionsError": "Correct the section `beam` ([scale.md](scale.md)).",
    "SourceAway": "Prefect retries a stage. Wait until the server of `source.path` answers.",
    "SourceError": "Correct the section `source` ([recipes.md](recipes.md#sources)).",
    "TooManyFailed": "Look at the outcomes. Raise the named limit of `download`, or mend the list.",
    "ModelNotFound": "Correct the path or the hub id. Check the network, and `HF_TOKEN`.",
    "CacheUnusable": "Set `KILN_CACHE` (for models of the hub, `HF_HOME`) to a writable folder.",
    "CacheFull": "Free space on its disk, or set the variable of the message, and run again.",
    "ModelAway": "Prefect retries a stage. Check the network, and run again later.",
    "GateError": "Correct the rule ([recipes.md](recipes.md#the-gate)).",
    "Rejected": "Change training, data or rules. The exit code is 3.",
    "SmokeTestFailed": "The gate rejects such a model. Look at the reason; it cannot be forced.",
    "EncodeFailed": "Add pictures, or change the named setting of `encode`.",
    "EncoderFailed": "Look at the log above the message. Run again.",
    "ImagesNotFinite": "Draw in `bfloat16` or `float32`; NaN weights cannot draw in any dtype.",
    "EncoderLost": "Prefect retries. If it happens again, lower `encode.batch_size`.",
    "Diverged": "Lower `train.learning_rate` or set `train.divergence` "
    "([training.md](training.md)).",
    "CheckpointError": "Look at the reason: mostly a full disk or no permission. Run again.",
    "CheckpointNotWritten": "Free space in the store, and run again: older checkpoints are intact.",
    "CheckpointsUnreachable": "Wait until the store answers, and run again.",
    "LostRank": "Look at the log of the named rank. Run again: the run resumes.",
    "WeightsLost": "Run again: the run resumes from its newest checkpoint.",
    "JobFailed": "Read the reason in the message. Run again: the run resumes.",
    "StageFailed": "Change what the message names. The stages before it are kept.",
    "TransientError": "Prefect retries. Run again later if it gave up.",
    "MachineShort": "Prefect retries. Free memory, or raise the limit that the message names.",
    "StorageError": "Correct the store's URL, permissions or credentials.",
    "StorageAway": "Prefect retries. Free space, or wait until the store answers.",
    "StoreError": "Correct `store` or `--store`: a folder, `s3://` or `gs://`.",
    "DiskTooSmall": "Free space, take a store on a larger disk, or correct the estimate by "
    "`plan.disk_gb`.",
    "StoreRefused": "Check the credentials of the store's client, and the bucket's rights.",
    "StoreNotThere": "Correct `--store` or `--registry`, or run a recipe first.",
    "NotInStore": "Take a key from `kiln ls`.",
    "NoSwap": "Use a local folder, `s3://` or `gs://` as the store.",
    "Damaged": "Run again: what is damaged is built again.",
    "NewerFormat": "Update this checkout.",
    "LockLost": "Run again.",
    "GarbageUnsure": "Do what the message says, then repeat `kiln gc`. Nothing was deleted.",
    "RegistryError": "Look at `kiln history NAME` and `kiln ls`.",
    "AliasNotWritten": "Run `kiln promote NAME VERSION` again; the next run mends it, too.",
    "ChampionChanged": "Prefect retries: the gate compares with the new champion.",
    "SignatureError": "Correct the key, or do not use this model "
    "([publishing.md](publishing.md#signatures)).",
    "PushFailed": "Check token, repository and network. The model stays in the registry.",
    "PlanFailed": "Read the last line of the message; for TPUs run `make setup-plan`.",
    "DoesNotFit": "Use the settings of the message ([gpu.md](gpu.md)).",
    "TopologyMissing": "Add `--gpu` or `--topology`.",
    "TwoPlaces": "Give `--gpu` or `--topology`, not both.",
    "HomeNotWritable": "Set `HOME` or `PREFECT_HOME`, or use a lasting server.",
    "NoOwnServer": "Run again, or use a lasting server.",
    "ServerAway": "Start the Prefect server, or unset `PREFECT_API_URL`.",
    "SliceUnavailable": "Prefect retries. Choose another zone or capacity ([tpu.md](tpu.md)).",
    "Outage": "Prefect retries. Run again when the network or the hosts are back.",
    "WorkersLost": "Prefect retries. Look at the logs of the workers ([scale.md](scale.md)).",
    "WorkerDiffers": "Give the workers the same code and packages ([scale.md](scale.md)).",
}
