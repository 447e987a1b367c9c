"""Settings of the flow `generate`: the model, the prompts and the sampler."""

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import PositiveInt, ValidationError

from configs.errors import Refused
from configs.explain_errors import explain
from configs.settings.base_section import ModelPlace, ReadFile, StoredUrl, setting
from configs.settings.evaluate import Prompts, Sampling
from configs.settings.recipe import RuntimeName


class Generate(Prompts, Sampling):
    """Settings of a `generate` run.

    Of a model with a recipe, settings of `Sampling` that are not given are those of the recipe's
    `evaluate`.
    """

    model: ModelPlace = setting(not_in_key="content")
    """Model: registry name (`digits` for its champion, `digits@v2`, `digits@candidate`), folder,
    hub id, or fsspec URL."""
    negative_prompt: str | None = None
    """Negative prompt of classifier-free guidance; null: the empty prompt."""
    references: tuple[str, ...] = setting((), not_in_key="content")
    """Files of reference pictures, in order, for a model of a family that reads them. They are the
    same for every prompt."""
    reference_pixels: PositiveInt | None = setting(None, in_key_with="references")
    """Largest area of a reference, in pixels; null: that of the model's recipe (encode), without a
    recipe 1024 x 1024."""
    reference_step: PositiveInt | None = setting(None, in_key_with="references")
    """Divisor of a reference's sides, in pixels; null: encode.bucket_step of the model's recipe,
    without a recipe the least that the model supports."""
    control: tuple[ReadFile, ...] = setting((), not_in_key="content")
    """Files of control pictures, for a ControlNet: one for all prompts, or one for each."""
    num_images_per_prompt: PositiveInt = 4
    """Pictures per prompt and round; also the batch size."""
    num_rounds: PositiveInt = 1
    """Rounds, each with new noise."""
    grid_columns: PositiveInt | None = setting(None, not_in_key="execution")
    """Pictures per row of the grid; null: num_images_per_prompt."""
    num_inference_steps: PositiveInt | None = None
    """Denoising steps; null: as guidance_scale."""
    ddim_eta: float = setting(0.0, ge=0, le=1)
    """DDIM's eta (arXiv 2010.02502); 0 is deterministic."""
    guidance_scale: float | None = setting(None, ge=0)
    """Classifier-free guidance scale; 1 or less turns guidance off (for Z-Image 0). For FLUX.1 dev
    it is an input of the denoiser. Null: as the model's recipe evaluated it; without a recipe, the
    default of the family's pipeline in diffusers."""
    seed: int = setting(42, ge=0, lt=2**63)
    """Seed of the noise, which the host draws."""
    fixed_noise: bool = False
    """Start every prompt and round from equal noise (fixed_code)."""
    runtime: RuntimeName = "torch"
    """Runtime that samples."""
    device: str = setting("auto", not_in_key="execution")
    """Device: see train.device of a recipe."""
    store: StoredUrl = setting("store", not_in_key="destination")
    """Artifact store: folder or fsspec URL."""
    registry: StoredUrl | None = setting(None, not_in_key="destination")
    """Registry folder or fsspec URL; null: `registry` in the store."""


def read_settings(
    model: str, prompts: Sequence[str] | None, settings: Mapping[str, Any] | None
) -> Generate:
    """The settings of a `generate` run. Raises Refused, with one line per invalid setting."""
    own = {"model": model, "prompts": tuple(prompts or ())}
    if twice := sorted(own.keys() & (settings or {}).keys()):
        raise Refused(f"generate: {twice[0]} is an argument, not a setting")
    values = {**own, **(settings or {})}
    try:
        return Generate.model_validate(values)
    except ValidationError as error:
        raise Refused(explain("generate", error, values, Generate)) from None
