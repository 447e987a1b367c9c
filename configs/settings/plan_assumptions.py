"""Settings of the section `plan`: assumptions of `kiln plan` and of the estimates before a run."""

from __future__ import annotations

from pydantic import Field, PositiveInt

from configs.settings.base_section import Section


class Plan(Section):
    """Assumptions of `kiln plan` and of the estimates before a run."""

    pictures: PositiveInt | None = Field(
        None, description="Pictures in the dataset; null: storage per picture."
    )
    chip_hour_price: float | None = Field(
        None, gt=0, description="Price per chip and hour, in any currency; null: no cost estimate."
    )
    disk_gb: float | None = Field(
        None,
        ge=0,
        description="Disk that a run needs, in GB, where its estimate is wrong; 0: no check of the "
        "free disk; null: the estimate.",
    )
