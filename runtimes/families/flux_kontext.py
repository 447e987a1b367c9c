"""FLUX.1 Kontext: FLUX.1's transformer, which also reads the tokens of one reference picture.

The published model is described by its code alone; diffusers' FluxKontextPipeline is the reference.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from runtimes.families import family
from runtimes.families.flux import Flux, original_layer, positions


class FluxKontext(Flux):
    """A reference's tokens follow the picture's; their first coordinate is 1, not 0.

    The pipeline takes one reference for each picture.
    """

    name = "flux_kontext"
    pipelines = ("FluxKontextPipeline",)
    max_references = 1
    reference_arguments: ClassVar[Mapping[str, Any]] = {"_auto_resize": False}
    kohya = family.KohyaNames(
        *({"text_encoder": "lora_te1"}, original_layer),
        lambda transformer, prediction_type: family.KohyaBase(
            *("flux_kontext", "Flux.1-dev"), "https://github.com/black-forest-labs/flux"
        ),
        *("musubi-tuner", "networks.lora_flux"),
    )

    def reference_positions(self, latents: Any, number: int) -> Any:
        return positions(latents, number + 1)

    def pipeline_arguments(
        self, pipe: Any, options: Mapping[str, Any], count: int
    ) -> dict[str, Any]:
        """The pipeline draws `max_area` pixels of the given shape, by default 1024 x 1024."""
        if "height" not in options:
            return dict(options)
        return {**options, "max_area": options["height"] * options["width"]}
