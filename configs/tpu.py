"""The section `tpu`: the slice that training is sent to."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from configs.section import Section

#: Software that a slice of a kind is made with, by the beginning of its accelerator type: Cloud
#: TPU's page "TPU software versions". Slices of another kind are refused it.
SOFTWARE = {
    "v2": "tpu-ubuntu2204-base",
    "v3": "tpu-ubuntu2204-base",
    "v4": "tpu-ubuntu2204-base",
    "v5litepod": "v2-alpha-tpuv5-lite",
    "v5p": "v2-alpha-tpuv5",
    "v6e": "v2-alpha-tpuv6e",
}


class Tpu(Section):
    """A Cloud TPU slice: made by gcloud when training begins, and deleted when it has ended."""

    name: str = Field(description="Name of the slice.", pattern=r"^[a-z][-a-z0-9]*$", max_length=60)
    zone: str = Field(description="Zone, such as us-east5-a.")
    project: str | None = Field(None, description="Project; null is gcloud's own.")
    accelerator_type: str = Field(description="Kind and size, such as v5p-8.")
    version: str | None = Field(
        None, description="Software version of its machines; null is that of the kind."
    )
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

    @property
    def kind(self) -> str:
        """The beginning of the accelerator type, such as v5p."""
        return self.accelerator_type.partition("-")[0]

    @property
    def software(self) -> str:
        """The software version that gcloud is told."""
        return self.version or SOFTWARE[self.kind]

    @model_validator(mode="after")
    def _goes_together(self) -> Tpu:
        if self.kind == "v5e":
            raise ValueError(
                f"accelerator_type {self.accelerator_type}: gcloud calls it "
                f"{self.accelerator_type.replace('v5e', 'v5litepod')}"
            )
        known = SOFTWARE.get(self.kind)
        if known is None and self.version is None:
            raise ValueError(
                f"accelerator_type {self.accelerator_type}: name its version, too "
                f"(known are those of {', '.join(SOFTWARE)})"
            )
        if known is not None and self.version in {*SOFTWARE.values()} - {known}:
            raise ValueError(
                f"version {self.version} is not for {self.accelerator_type}: leave it at null "
                f"({known})"
            )
        return self
