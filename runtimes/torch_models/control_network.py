"""A ControlNet (arXiv 2302.05543) beside a frozen denoiser: new from the base, or from a folder.

diffusers has its classes and formulas. The copied layers have the base's weights in float32, and
the output layers are zero: at step 0, the denoiser predicts as without it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import diffusers
import torch

from configs.errors import Refused
from configs.secrets import one_line
from configs.settings.train import Train
from runtimes.families import Family
from runtimes.pipeline_folder.folder import Base, read_config
from runtimes.torch_models import loading

#: Settings of a ControlNet's config that must be those of its denoiser.
SHARED = (
    *("in_channels", "block_out_channels", "down_block_types", "layers_per_block"),
    *("cross_attention_dim", "addition_embed_type", "class_embed_type"),
    *("attention_head_dim", "num_attention_heads", "joint_attention_dim", "guidance_embeds"),
)


@dataclass(frozen=True)
class Controlled:
    """A denoiser whose calls also take the outputs of a ControlNet.

    Args:
        family: family of both.
        denoiser: the denoiser.
        network: the ControlNet.
        control: [B, 3, H, W] in 0..1 or [B, C, h, w], as `Family.control`.
    """

    family: Family
    denoiser: Any
    network: Any
    control: torch.Tensor

    @property
    def config(self) -> Any:
        """The denoiser's."""
        return self.denoiser.config

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        """The denoiser's output; training has a scale of 1, as diffusers' scripts."""
        about = (self.network, self.control, 1.0, inputs, named)
        return self.denoiser(*inputs, **named, **self.family.control_residuals(*about))


def new_control(base: Base, settings: Train) -> Any:
    """A ControlNet in float32 on the CPU, with the weights of the base's first blocks.

    Its other weights depend on `settings.seed` alone. Raises Refused for damaged weights.
    """
    denoiser = loading.empty_denoiser(base.denoiser_folder, None)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(settings.seed)
        network = _empty(base, denoiser, settings)
    stored = loading.open_weights(denoiser, base.denoiser_folder, torch.float32, None, 0)
    names = network.state_dict().keys() & stored.keys()
    network.load_state_dict({name: stored[name][...] for name in names}, strict=False)
    return network


def empty_control(base: Base, settings: Train, folder: Path | None = None) -> Any:
    """A ControlNet on `meta`: a new one, or by the config of a folder. Raises Refused."""
    with torch.device("meta"):
        if folder is None:
            denoiser = loading.empty_denoiser(base.denoiser_folder, None)
            return _empty(base, denoiser, settings)
        return _class(base.family).from_config(_config(base, folder))


def load_control(base: Base, folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    """The ControlNet of a folder of diffusers, on the CPU.

    Raises:
        Refused: weights are missing or damaged, or it is for another family or architecture.
    """
    _config(base, folder)
    try:
        network, loaded = _class(base.family).from_pretrained(
            folder, torch_dtype=dtype, output_loading_info=True, **loading.SAFE
        )
    except (OSError, RuntimeError, ValueError) as error:
        raise Refused(f"{folder} does not load: {one_line(error)}") from None
    if missing := sorted(loaded["missing_keys"]):
        raise Refused(f"{folder} lacks {len(missing)} weights, such as {missing[0]}")
    return network


def check_control(base: Base, settings: Train, folder: Path | None) -> dict[str, tuple[int, ...]]:
    """Names and shapes of a ControlNet's weights, without reading any.

    Raises:
        Refused: the folder's is for another family or architecture, or the base has fewer layers
            than the settings ask for.
    """
    asked = settings.controlnet.layers
    if asked and not {*asked} <= {*base.denoiser}:
        raise Refused(
            f"it is for flux, not {base.family.name}: leave it out",
            setting=f"train.controlnet.{next(iter(asked))}",
        )
    for name, number in asked.items():
        if number > base.denoiser[name]:
            raise Refused(
                f"{number} exceeds the {base.denoiser[name]} of the base",
                setting=f"train.controlnet.{name}",
            )
    network = empty_control(base, settings, folder)
    return {name: tuple(tensor.shape) for name, tensor in network.state_dict().items()}


def published_config(network: Any) -> dict[str, Any]:
    """The content of a ControlNet's config.json, by which diffusers loads it."""
    config: Mapping[str, Any] = network.config
    kept = {name: value for name, value in config.items() if name != "_name_or_path"}
    return {
        "_class_name": type(network).__name__,
        "_diffusers_version": diffusers.__version__,
        **{name: value for name, value in kept.items() if not name.startswith("_")},
    }


def _empty(base: Base, denoiser: Any, settings: Train) -> Any:
    scale = base.encoders["vae_scale_factor"]
    return base.family.empty_control(denoiser, scale, settings.controlnet.layers)


def _class(family: Family) -> Any:
    return getattr(diffusers, family.control_class)


def _config(base: Base, folder: Path) -> dict[str, Any]:
    """The config of a folder's ControlNet. Raises Refused if it does not fit the base."""
    config = read_config(folder / "config.json")
    kind = config.get("_class_name")
    if kind != base.family.control_class:
        raise Refused(
            f"{folder}: its class is {kind}, a model of family {base.family.name} has a "
            f"{base.family.control_class}"
        )
    if config.get("conditioning_embedding_channels") is not None or config.get("num_mode"):
        raise Refused(f"{folder}: a ControlNet of several modes or of pixels is not trained here")
    for name in SHARED:
        if name in config and name in base.denoiser:
            own, wanted = (_listed(each[name]) for each in (config, base.denoiser))
            if own != wanted:
                raise Refused(f"{folder}: {name} is {own}, the base's is {wanted}")
    return dict(config)


def _listed(value: Any) -> Any:
    return list(value) if isinstance(value, tuple | list) else value
