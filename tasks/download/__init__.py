"""The download stage: fetch the pictures of a source's rows into image shards."""

from tasks.download.check_dataset_limits import check_data, warn_of_captions
from tasks.download.download_shard import STAGE, VERSION
from tasks.download.plan_shards import DownloadPlan, ShardSpec
from tasks.download.stage import (
    build,
    check,
    choose_retry,
    key_parts,
    plan,
    planned,
    settings_for_key,
    show,
)
from tasks.download.stage_errors import SourceError, TooManyFailed

__all__ = [
    "STAGE",
    "VERSION",
    "DownloadPlan",
    "ShardSpec",
    "SourceError",
    "TooManyFailed",
    "build",
    "check",
    "check_data",
    "choose_retry",
    "key_parts",
    "plan",
    "planned",
    "settings_for_key",
    "show",
    "warn_of_captions",
]
