"""Settings of the section `plan`: assumptions of `kiln plan`."""

from __future__ import annotations

from pydantic import Field, PositiveInt

from configs.base_section import Section


class Plan(Section):
    """Assumptions of `kiln plan`."""

    pictures: PositiveInt | None = Field(
        None, description="Pictures in the dataset; null: storage per picture."
    )
    chip_hour_price: float | None = Field(
        None, gt=0, description="Price per chip and hour, in any currency; null: no cost estimate."
    )
