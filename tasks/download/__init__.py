"""The download stage: fetch the pictures of a source's rows into image shards."""

from configs.errors import Failed
from tasks.download.shard import STAGE, VERSION
from tasks.download.shard_plan import DownloadPlan, ShardSpec
from tasks.download.stage import DownloadStage, check, plan, planned, settings_for_key

__all__ = [
    "STAGE",
    "VERSION",
    "DownloadPlan",
    "DownloadStage",
    "Failed",
    "Refused",
    "ShardSpec",
    "check",
    "plan",
    "planned",
    "settings_for_key",
]
