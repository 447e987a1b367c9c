"""The publish stage: gate, model card, assembled weights and registry."""

from tasks.publish.stage import (
    STAGE,
    VERSION,
    Rejected,
    build,
    key_parts,
    lineage_of,
    register,
    registry_of,
    settings_for_key,
    show,
    show_verdicts,
    show_version,
)

__all__ = [
    "STAGE",
    "VERSION",
    "Rejected",
    "build",
    "key_parts",
    "lineage_of",
    "register",
    "registry_of",
    "settings_for_key",
    "show",
    "show_verdicts",
    "show_version",
]
