"""What ComfyUI reads, by comfyui.yaml: its nodes, and the layers that its key maps take."""

import re
from pathlib import Path

import yaml
from safetensors import safe_open

COMFYUI = yaml.safe_load(Path(__file__).with_name("comfyui.yaml").read_text(encoding="utf-8"))


def assert_mapped(file: Path, family: str) -> None:
    """Assert that ComfyUI's key map of a family has each layer of a file of adapters."""
    with safe_open(file, "np") as stored:
        layers = {_layer_of(key) for key in stored.keys()}  # noqa: SIM118
    known = [_pattern(p, layer) for p, ls in COMFYUI["keys"][family].items() for layer in ls]
    unknown = [n for n in layers if not any(pattern.fullmatch(n) for pattern in known)]
    assert layers and not unknown


def _layer_of(key: str) -> str:
    """A key without the name of its tensor."""
    return re.sub(r"\.(lora_(up|down|A|B)\.weight|alpha|dora_scale)$", "", key)


def _pattern(prefix: str, layer: str) -> re.Pattern[str]:
    if prefix.startswith("lora_"):
        return re.compile(prefix + layer.replace(".", "_").replace("*", r"\d+"))
    return re.compile(re.escape(prefix) + layer.replace(".", r"\.").replace("*", r"\d+"))
