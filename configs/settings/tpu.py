"""Settings of the section `tpu`: the Cloud TPU slice of the train stage."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from configs.settings.base_section import Section

#: Default software version by kind of accelerator, from Cloud TPU's page "TPU software versions".
#: A version is valid for its own kinds only.
SOFTWARE = {
    "v2": "tpu-ubuntu2204-base",
    "v3": "tpu-ubuntu2204-base",
    "v4": "tpu-ubuntu2204-base",
    "v5litepod": "v2-alpha-tpuv5-lite",
    "v5p": "v2-alpha-tpuv5",
    "v6e": "v2-alpha-tpuv6e",
}


class Tpu(Section):
    """A Cloud TPU slice, created by gcloud before training and deleted after it."""

    name: str = Field(description="Name of the slice.", pattern=r"^[a-z][-a-z0-9]*$", max_length=60)
    zone: str = Field(description="Google Cloud zone, such as us-east5-a.")
    project: str | None = Field(
        None, description="Google Cloud project; null: gcloud's configured one."
    )
    accelerator_type: str = Field(description="Kind and size of the slice, such as v5p-8.")
    version: str | None = Field(
        None, description="Software version of the workers; null: the default of the kind."
    )
    capacity: Literal["on_demand", "reserved", "spot"] = Field(
        "on_demand", description="Provisioning model; a spot slice can be preempted."
    )
    queued: bool = Field(False, description="Request the slice as a queued resource and wait.")
    network: str | None = Field(None, description="VPC network; null: the project's default.")
    subnetwork: str | None = Field(None, description="Subnetwork; null: the network's default.")
    service_account: str | None = Field(
        None,
        description="Service account of the workers, with read and write access to the store; "
        "null: the project's default.",
    )
    libtpu_args: str = Field("", description="LIBTPU_INIT_ARGS of the training processes.")
    keep: bool = Field(False, description="Keep the slice after training.")
    restarts: int = Field(
        20, ge=0, description="Maximum restarts after a preemption, each from the last checkpoint."
    )

    @property
    def kind(self) -> str:
        """The prefix of the accelerator type, such as v5p."""
        return self.accelerator_type.partition("-")[0]

    @property
    def software(self) -> str:
        """The software version for gcloud. Raises KeyError if an unknown kind has no version."""
        return self.version or SOFTWARE[self.kind]

    @model_validator(mode="after")
    def _check_accelerator(self) -> Tpu:
        if self.kind == "v5e":
            name = self.accelerator_type.replace("v5e", "v5litepod")
            raise ValueError(f"accelerator_type {self.accelerator_type}: gcloud calls it {name}")
        known = SOFTWARE.get(self.kind)
        if known is None and self.version is None:
            raise ValueError(
                f"accelerator_type {self.accelerator_type}: set version too "
                f"(only {', '.join(SOFTWARE)} have a default)"
            )
        if known is not None and self.version in {*SOFTWARE.values()} - {known}:
            raise ValueError(
                f"version {self.version} does not support {self.accelerator_type}: "
                f"leave it at null ({known})"
            )
        return self
