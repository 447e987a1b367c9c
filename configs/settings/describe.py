"""Settings of the section `describe`: values of each picture, computed once."""

from typing import Any

from pydantic import PositiveInt

from configs.settings.base_section import Section, setting


class Describe(Section):
    """Compute values of each picture, such as scores, embeddings and hashes."""

    device: str = setting("auto", not_in_key="execution")
    """Device: see train.device; without a number, all devices of its kind."""
    processes: PositiveInt | None = setting(None, not_in_key="execution")
    """Processes per machine; null: one per accelerator, one on a CPU."""
    beam: dict[str, Any] = setting({}, not_in_key="execution")
    """Beam pipeline options of this stage, over those of section `beam`."""
