"""The publish stage: gate, model card, assembled weights and registry."""

from tasks.publish.stage import (
    STAGE,
    VERSION,
    Rejected,
    build,
    registry_of,
    settings_for_key,
    show,
)

__all__ = ["STAGE", "VERSION", "Rejected", "build", "registry_of", "settings_for_key", "show"]
