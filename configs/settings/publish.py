"""Settings of the section `publish`: the gate, the published weights and the registry."""

from __future__ import annotations

from pydantic import PositiveInt

from configs.settings.base_section import Dtype, Section, StoredUrl, setting

#: Pattern of a model's name in the registry.
NAME = r"[A-Za-z0-9][A-Za-z0-9._-]*"


class Hub(Section):
    """A repository of the Hugging Face hub that receives each published model.

    The token is that of HF_TOKEN, of `hf auth login`, or of Prefect's secret block `hub-token`.
    """

    repo: str = setting(pattern=r"^[\w.-]+/[\w.-]+$")
    """Repository, as owner/name."""
    private: bool = True
    """Create the repository as private, and refuse a public one."""


class Publish(Section):
    """The gate, the weights to publish and the registry."""

    name: str = setting(pattern=f"^{NAME}$", aka="output_name (KS)")
    """Model name in the registry."""
    gate: tuple[str, ...] = ()
    """Rules that a model must pass, such as `digit/new >= 0.9`, `cmmd < base`, `clip_score >=
    champion * 0.98` or, for 95% confidence, `kid < champion at 95%`; without rules every model
    passes."""
    require_license: bool = False
    """Refuse a model without `license` and without one in the base's card."""
    smoke_test: bool = True
    """Load the folder by plain diffusers in a process of its own, and draw, before it is
    registered."""
    max_bytes: PositiveInt | None = None
    """Maximum size of the published folder, in bytes; null: no limit."""
    registry: StoredUrl | None = setting(None, not_in_key="destination")
    """Registry folder or fsspec URL; null: `registry` in the store."""
    dtype: Dtype = setting("float16", aka="save_precision (K)")
    """Precision of the published files; diffusers loads them as float32, or as the `dtype` of
    `from_pretrained`."""
    merge: bool = setting(False, needs="train.method == lora")
    """For train.method lora: publish a full pipeline with merged adapters, and the adapters in
    `lora/`; false publishes the adapters only."""
    license: str | None = None
    """Licence; null: that of the base's card."""
    hub: Hub | None = setting(
        None,
        not_in_key="destination",
        aka="push_to_hub hub_model_id (DS): `{repo: owner/name}`, if the gate passes",
    )
    """Push published models to the hub; null: none."""
    signing_key: str | None = setting(None, not_in_key="destination")
    """PEM file of the private elliptic-curve key that signs published models; its password is
    KILN_SIGNING_PASSWORD."""
    keep_versions: PositiveInt | None = setting(None, not_in_key="destination")
    """Newest versions to keep in the registry, beside the champion and the one before it, which a
    rollback restores; null: all."""
