"""The encode stage: image shards to latent shards."""

from tasks.encode.keys import STAGE, VERSION, settings_for_key
from tasks.encode.stage import EncodeFailed, build, key_parts, show

__all__ = [
    "STAGE",
    "VERSION",
    "EncodeFailed",
    "build",
    "key_parts",
    "settings_for_key",
    "show",
]
