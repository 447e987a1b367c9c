"""The download stage: fetch the pictures of a source's rows into image shards."""

from tasks.download.shard import VERSION
from tasks.download.shard_plan import DownloadPlan
from tasks.download.stage import DownloadStage, check, plan, planned, settings_for_key

__all__ = [
    "VERSION",
    "DownloadPlan",
    "DownloadStage",
    "check",
    "plan",
    "planned",
    "settings_for_key",
]
