"""ComfyUI knows each node and input of the published workflow, and each key of the file."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from comfyui_keys import COMFYUI, assert_mapped
from kiln_command import ROOT
from PIL import Image
from tiny_adapters import write_adapters_of
from toy_recipes import digits

from configs.settings.recipe import Recipe
from configs.settings.train_parts import Lora
from runtimes.adapters.lora_files import LORA_WEIGHTS
from runtimes.families import family_named
from runtimes.pipeline_folder.folder import Base
from tasks.publish import comfyui
from tasks.publish.assemble import KOHYA_SUFFIX, write_adapters

#: Family -> base of true size.
BASES = {
    "sd": "stable-diffusion-2-base",
    "sdxl": "stable-diffusion-xl-base-1.0",
    "flux": "FLUX.1-dev",
    "flux2": "FLUX.2-klein-base-4B",
    "qwen_image": "Qwen-Image",
    "z_image": "Z-Image",
}
#: Family -> sampler, schedule and text encoders' loader. ComfyUI's own templates have them.
SAMPLED = {
    "sd": ("euler", "normal", None),
    "sdxl": ("euler", "normal", None),
    "flux": ("euler", "simple", "flux"),
    "flux2": ("euler", "simple", "flux2"),
    "qwen_image": ("euler", "simple", "qwen_image"),
    "z_image": ("euler", "simple", "lumina2"),
}
#: Type of an input of a node -> whether a value has it; of other types, an input is a link.
VALUES: dict[str, Callable[[Any], bool]] = {
    "file": lambda value: value.endswith(".safetensors"),
    "text": lambda value: isinstance(value, str),
    "number": lambda value: isinstance(value, float),
    "count": lambda value: type(value) is int and value >= 0,
    "flag": lambda value: isinstance(value, bool),
}


def workflow(base: Base, **settings: Any) -> dict[str, Any]:
    recipe = recipe_for(base, **settings)
    scheduler = base.scheduler
    nodes = comfyui.workflow(recipe, base, scheduler, "foxes.safetensors", "a fox")
    assert nodes is not None
    return nodes


def recipe_for(base: Base, **settings: Any) -> Recipe:
    drawn = {
        "evaluate.guidance_scale": 3.5,
        "evaluate.num_inference_steps": 20,
        "evaluate.scheduler": None,
    }
    return digits(Path("unused"), **{"model.path": str(base.folder), **drawn, **settings})


def open_base(name: str) -> Base:
    return Base.open(ROOT / "bench/models" / BASES[name])


def only(nodes: dict[str, Any], kind: str) -> dict[str, Any]:
    (inputs,) = [n["inputs"] for n in nodes.values() if n["class_type"] == kind]
    return dict(inputs)


@pytest.mark.parametrize("name", BASES)
def test_comfyui_knows_each_node_and_what_goes_in(name: str) -> None:
    nodes = workflow(open_base(name))
    for node in nodes.values():
        known = COMFYUI["nodes"][node["class_type"]]["inputs"]
        assert node["inputs"].keys() == known.keys(), node
        for key, wanted in known.items():
            value = node["inputs"][key]
            if isinstance(wanted, list):
                assert value in wanted, (node, key)
            elif wanted in VALUES:
                assert VALUES[wanted](value), (node, key)
            else:
                source, output = value
                assert COMFYUI["nodes"][nodes[source]["class_type"]]["outputs"][output] == wanted
    sampled = only(nodes, "KSampler")
    assert (sampled["steps"], sampled["seed"]) == (20, 0)
    loaders = [n for n in nodes.values() if "CLIPLoader" in n["class_type"]]
    (encoders,) = [n["inputs"]["type"] for n in loaders] or [None]
    assert (sampled["sampler_name"], sampled["scheduler"], encoders) == SAMPLED[name]
    texts = [nodes[sampled[text][0]] for text in ("positive", "negative")]
    assert texts[1]["inputs"]["text"] == ""
    if name != "flux":
        assert texts[0]["inputs"]["text"] == "a fox"
        assert sampled["cfg"] == (4.5 if name == "z_image" else 3.5)
    else:  # an input of the denoiser
        assert (sampled["cfg"], only(nodes, "FluxGuidance")["guidance"]) == (1.0, 3.5)


@pytest.mark.parametrize(
    ("name", "targets"),
    [
        *((name, "attention") for name in BASES),
        *((name, "all") for name in BASES if name != "flux2"),  # nobody names its modulation
    ],
)
def test_comfyui_maps_each_key(name: str, targets: Any, tmp_path: Path) -> None:
    base = open_base(name)
    lora = Lora(rank=1, target_modules=targets)
    texts = name in ("sd", "sdxl", "flux") and targets == "attention"
    trained = write_adapters_of(tmp_path / "lora.safetensors", base, lora, texts=texts)
    write_adapters(trained, base, tmp_path, name="foxes", dtype="float16", scheduler=None)
    kohya = (tmp_path / f"foxes{KOHYA_SUFFIX}").is_file()
    file = comfyui.adapter_file(base.family, "foxes", lora, kohya=kohya)
    assert file is not None
    assert_mapped(tmp_path / file, name)


def test_noise_levels_are_those_of_the_model_s_scheduler() -> None:
    """mu for FLUX, whose node takes its exponential; a factor for the others."""
    size = {"evaluate.height": 512, "evaluate.width": 768}
    flux = only(workflow(open_base("flux"), **size), "ModelSamplingFlux")
    assert (
        flux["max_shift"] == flux["base_shift"] == pytest.approx(0.5 + 0.65 * 1280 / 3840, abs=1e-4)
    )
    z_image = only(workflow(open_base("z_image"), **size), "ModelSamplingAuraFlow")
    assert z_image["shift"] == open_base("z_image").scheduler["shift"]
    qwen = only(workflow(open_base("qwen_image"), **size), "ModelSamplingAuraFlow")
    assert qwen["shift"] == pytest.approx(np.exp(0.5 + 0.4 * 1280 / 7936), abs=1e-4)


def test_a_base_of_one_file_has_its_own_name() -> None:
    settings = {"model.path": "https://example.org/files/dream.safetensors"}
    nodes = workflow(open_base("sdxl"), **settings)
    assert only(nodes, "CheckpointLoaderSimple") == {"ckpt_name": "dream.safetensors"}
    assert only(nodes, "LoraLoader")["lora_name"] == "foxes.safetensors"


def test_a_base_that_comfyui_has_no_files_of_has_no_workflow(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    base = open_base("sdxl")
    monkeypatch.delitem(comfyui.FILES, "stable-diffusion-xl-v1-base")
    assert comfyui.workflow(recipe_for(base), base, base.scheduler, "x", "a fox") is None


def test_prompts_are_encoded_with_the_adapters_of_text_encoders() -> None:
    nodes = workflow(
        open_base("flux"), **{"train.method": "lora", "train.train_text_encoder": True}
    )
    encoders = [n["inputs"]["clip"] for n in nodes.values() if n["class_type"] == "CLIPTextEncode"]
    assert [nodes[node]["class_type"] for node, _ in encoders] == ["LoraLoader"] * 2


def test_the_picture_has_the_workflow_that_the_file_has(tmp_path: Path) -> None:
    nodes = workflow(open_base("sdxl"))
    picture = np.arange(48, dtype=np.uint8).reshape(4, 4, 3)
    comfyui.write(nodes, picture, tmp_path)
    drawn = Image.open(tmp_path / comfyui.PICTURE)
    assert np.array_equal(np.asarray(drawn), picture)
    assert json.loads(drawn.text["prompt"]) == nodes  # type: ignore[attr-defined]
    assert json.loads((tmp_path / comfyui.WORKFLOW).read_text(encoding="utf-8")) == nodes


def test_comfyui_gets_no_file_whose_dora_it_would_not_read() -> None:
    z_image, flux = (family_named(name) for name in ("z_image", "flux"))
    assert comfyui.adapter_file(z_image, "foxes", Lora(dora=True), kohya=True) is None
    assert comfyui.adapter_file(z_image, "foxes", Lora(), kohya=True) == LORA_WEIGHTS
    kohya = comfyui.adapter_file(flux, "foxes", Lora(dora=True), kohya=True)
    assert kohya == f"foxes{KOHYA_SUFFIX}"
