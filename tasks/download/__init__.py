"""The download stage: fetch the pictures of a source's rows into image shards."""

from configs.errors import Failed
from tasks.download.shard import STAGE, VERSION
from tasks.download.shard_plan import DownloadPlan, ShardSpec
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
from tasks.download.statistics import check_data, warn_of_captions

__all__ = [
    "STAGE",
    "VERSION",
    "DownloadPlan",
    "Failed",
    "ShardSpec",
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
