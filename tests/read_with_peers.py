"""Reads published adapters with code of InvokeAI and LyCORIS: `python read_with_peers.py REQUESTS`.

A process with both on its path runs this file, which imports nothing of Kilnworks. REQUESTS is a
file in JSON. A request `{"file": PATH}` is answered with the kinds of base that InvokeAI's probes
name. With a folder `base` and a file `out`, the reader adds the adapters to a base of zeros and
writes its weights; the answer names what it left out. `kind` is InvokeAI's kind of base, or null
for LyCORIS.
"""

import json
import logging
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

# torchvision's operators are for CUDA: the module that registers them fails beside a CPU build.
sys.modules["torchvision._meta_registrations"] = ModuleType("_meta_registrations")

import diffusers  # noqa: E402
import torch  # noqa: E402
import transformers  # noqa: E402
from invokeai.backend.flux.model import Flux, FluxParams  # noqa: E402
from invokeai.backend.model_manager.configs.factory import ModelConfigFactory  # noqa: E402
from invokeai.backend.model_manager.load.model_cache.torch_module_autocast import (  # noqa: E402
    torch_module_autocast,
)
from invokeai.backend.model_manager.load.model_loaders.lora import LoRALoader  # noqa: E402
from invokeai.backend.model_manager.taxonomy import BaseModelType, ModelFormat  # noqa: E402
from invokeai.backend.patches.layer_patcher import LayerPatcher  # noqa: E402
from invokeai.backend.util import InvokeAILogger  # noqa: E402
from lycoris import LycorisNetwork, create_lycoris_from_weights  # noqa: E402
from safetensors.torch import save_file  # noqa: E402

#: Kind of base -> component of the base -> prefix of its layers' keys.
PREFIXES = {
    "sd-1": {"unet": "lora_unet_", "text_encoder": "lora_te_"},
    "sdxl": {"unet": "lora_unet_", "text_encoder": "lora_te1_", "text_encoder_2": "lora_te2_"},
    "flux": {"transformer": "lora_transformer-", "text_encoder": "lora_clip-"},
    "flux2": {"transformer": "lora_transformer-"},
    "z-image": {"transformer": "lora_transformer-"},
    "qwen-image": {"transformer": "lora_transformer-"},
}


class Warned(logging.Handler):
    """Collects what the patcher warns of, such as a layer that the model lacks."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def kinds_of(file: str) -> list[str]:
    """The kinds of base for which InvokeAI would install a file, as adapters or anything else."""
    found = ModelConfigFactory.from_model_on_disk(file).details.values()
    return [
        f"{config.type.value} {config.base.value}" for config in found if hasattr(config, "base")
    ]


def zeros(folder: Path, kind: str | None) -> torch.nn.Module:
    """A component with weights of zero, in the class that InvokeAI runs."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    with torch.device("meta"):
        network = _network(config, kind)
    values = {name: torch.zeros(value.shape) for name, value in network.state_dict().items()}
    network.load_state_dict(values, assign=True)
    return network


def _network(config: dict[str, Any], kind: str | None) -> torch.nn.Module:
    if kind == "flux" and "num_single_layers" in config:  # the layout of its authors' code
        heads = config["num_attention_heads"]
        params = FluxParams(
            in_channels=config["in_channels"],
            vec_in_dim=config["pooled_projection_dim"],
            context_in_dim=config["joint_attention_dim"],
            hidden_size=heads * config["attention_head_dim"],
            mlp_ratio=4.0,
            num_heads=heads,
            depth=config["num_layers"],
            depth_single_blocks=config["num_single_layers"],
            axes_dim=list(config.get("axes_dims_rope", (16, 56, 56))),
            theta=10_000,
            qkv_bias=True,
            guidance_embed=config["guidance_embeds"],
        )
        return Flux(params)
    if "_class_name" in config:
        return getattr(diffusers, config["_class_name"]).from_config(config)
    model = getattr(transformers, config["architectures"][0])
    encoder = model(model.config_class(**config))
    if hasattr(encoder, "text_model"):
        return encoder
    # The transformers that InvokeAI pins, before 5.6, has the layers of each encoder there.
    network = torch.nn.Module()
    network.text_model = encoder
    return network


def add_by_invokeai(request: dict[str, Any]) -> list[str]:
    """Add adapters by InvokeAI's loader and patcher."""
    kind = request["kind"]
    loader = LoRALoader.__new__(LoRALoader)
    loader._model_base = BaseModelType(kind)
    loader._torch_dtype = torch.float32
    model = loader._load_model(SimpleNamespace(path=request["file"], format=ModelFormat.LyCORIS))
    unused = set(model.layers)
    added = {}
    for part, prefix in PREFIXES[kind].items():
        layers = {key for key in model.layers if key.startswith(prefix)}
        unused -= layers
        if layers:
            network = zeros(Path(request["base"]) / part, kind)
            torch_module_autocast.apply_custom_layers_to_model(network)
            how = {"prefix": prefix, "dtype": torch.float32, "force_direct_patching": True}
            with LayerPatcher.apply_smart_model_patches(network, [(model, 1.0)], **how):
                added |= changed(part, network)
    save_file(added, request["out"])
    return sorted(unused)


def add_by_lycoris(request: dict[str, Any]) -> list[str]:
    """Add adapters of a denoiser by LyCORIS."""
    network = zeros(Path(request["base"]) / request["part"], None)
    LycorisNetwork.apply_preset({"lora_prefix": "lora_unet"})
    adapters, stored = create_lycoris_from_weights(1.0, request["file"], network)
    adapters.merge_to(1.0)
    save_file(changed(request["part"], network), request["out"])
    taken = {adapter.lora_name for adapter in adapters.loras}
    return sorted(name for name in stored if name.partition(".")[0] not in taken)


def changed(part: str, network: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The weights that are no longer zeros, by component and name."""
    weights = network.state_dict().items()
    return {f"{part}.{name}": value.clone().contiguous() for name, value in weights if value.any()}


def main() -> None:
    warned = Warned()
    InvokeAILogger.get_logger(LayerPatcher.__name__).addHandler(warned)
    answers = []
    for request in json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")):
        if "out" not in request:
            answers.append(kinds_of(request["file"]))
        else:
            add = add_by_lycoris if request["kind"] is None else add_by_invokeai
            answers.append(add(request))
    print(json.dumps([*answers, warned.lines]))


main()
