"""Gate, model card, registry: what stands between a trained model and its users."""

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
