"""The section `tpu`: the slice that training is sent to."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from configs.section import Section


class Tpu(Section):
    """A Cloud TPU slice: made by gcloud when training begins, and deleted when it has ended."""

    name: str = Field(description="Name of the slice.", pattern=r"^[a-z][-a-z0-9]*$", max_length=60)
    zone: str = Field(description="Zone, such as us-east5-a.")
    project: str | None = Field(None, description="Project; null is gcloud's own.")
    accelerator_type: str = Field(description="Kind and size, such as v5p-8.")
    version: str = Field("v2-alpha-tpuv5", description="Software version of its machines.")
    capacity: Literal["on_demand", "reserved", "spot"] = Field(
        "on_demand", description="What it is made from; a spot slice may be taken away."
    )
    queued: bool = Field(False, description="Wait in the queue for it (queued resources).")
    network: str | None = Field(None, description="Network; null is the project's default one.")
    subnetwork: str | None = Field(None, description="Subnetwork; null is the default one.")
    service_account: str | None = Field(
        None, description="Whom its machines act as: they read and write the store."
    )
    libtpu_args: str = Field("", description="LIBTPU_INIT_ARGS of the training processes.")
    keep: bool = Field(False, description="Leave the slice when training has ended.")
    restarts: int = Field(
        20, ge=0, description="Times that a slice taken away is made anew, and training resumed."
    )
