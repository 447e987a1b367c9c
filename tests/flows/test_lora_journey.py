"""Sixty photos without captions and a checkpoint file become a LoRA that diffusers draws with."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import chips
import in_process
import numpy as np
import picture_sources
import pytest
import single_files
import torch
from comfyui_keys import assert_mapped
from diffusers import FluxPipeline
from kiln_command import ROOT, command, environment, kiln, python, run_json
from PIL import Image
from toy_recipes import toy

from runtimes.adapters.lora_files import LORA_WEIGHTS
from runtimes.families.family import pack
from runtimes.objective.random_draws import Stream, generator
from runtimes.torch_models.gpu_specs import GIB
from tasks.publish import comfyui

pytestmark = [pytest.mark.slow, pytest.mark.extended]
PROMPT = "a drawing of a fox"
#: A card that holds no step of adapters of rank 96 beside a resident 8-bit base.
CARD = "0.0788GB"


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """A folder of pictures without captions."""
    folder = tmp_path / "photos"
    folder.mkdir()
    for one in picture_sources.make_pictures(60):
        (folder / f"{one.name}.png").write_bytes(one.png)
    return folder


@pytest.fixture
def recipe(tmp_path: Path, photos: Path, tiny_model: Callable[[str], Path]) -> dict[str, Any]:
    """Overrides of a toy run whose base is a single file; its other components are `deep-flux`."""
    components = tiny_model("deep-flux")
    weights = single_files.flux_tensors(components)
    return toy("flux-lora", tmp_path / "store", {}, tiny_model) | {
        "model.path": str(single_files.write(tmp_path / "dream.safetensors", weights)),
        "model.components": str(components),
        "source": {"kind": "folder", "path": str(photos)},
        "evaluate.prompts.new.prompts": [PROMPT],
        "evaluate.dtype": "float32",
        "publish.dtype": "float32",
        "train.sample_every_n_steps": 0,
        "train.steps": 4,
        "train.learning_rate": 1e-2,
    }


@pytest.mark.soak
def test_photos_and_a_checkpoint_file_become_adapters_that_diffusers_draws_with(
    tmp_path: Path, recipe: dict[str, Any], api: str
) -> None:
    recipe["train.lora.base_precision"] = "nf4"
    report = in_process.finetune(tmp_path, "flux-lora", recipe, api)
    assert report["status"] == "published"
    folder = Path(report["model"])
    nodes = json.loads((folder / comfyui.WORKFLOW).read_text(encoding="utf-8"))
    assert "dream.safetensors" in {node["inputs"].get("unet_name") for node in nodes.values()}
    assert_drawn_alike(folder, Path(recipe["model.components"]))


@pytest.fixture
def ascend(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The files by which an Ascend host is known, and its emulated device, for commands."""
    chips.require("npu")
    folder = tmp_path / "ascend"
    folder.mkdir()
    (folder / "davinci0").touch()
    (folder / "version.cfg").write_text("toolkit_running_version=[8.0.0]\n")
    (folder / "sitecustomize.py").write_text(
        "from pathlib import Path\n"
        "from runtimes import detect_hardware\n"
        "detect_hardware.NPU_DEVICES = Path(__file__).parent\n"
    )
    monkeypatch.setenv("ASCEND_HOME_PATH", str(folder))
    monkeypatch.setenv("PYTHONPATH", f"{folder}:{ROOT}")
    with chips.standing_in("npu"):
        yield


def test_the_plan_s_advice_trains_on_a_card_that_is_too_small_without(
    tmp_path: Path, recipe: dict[str, Any], ascend: None, api: str
) -> None:
    """Each process of the run has the card's memory, that of the evaluation too."""
    recipe |= {f"{stage}.device": "npu" for stage in ("encode", "train", "evaluate")}
    recipe |= {"train.lora.base_precision": "int8", "train.lora.rank": 96}
    asked = command("plan", "flux-lora", "--gpu", CARD, "--json", overrides=recipe)
    told = python(*asked[1:], env=environment(tmp_path))
    plan = json.loads(told.stdout)
    assert not plan["fits"], told.stderr
    advised = plan["advice"][0]["settings"]
    assert advised["train.stream_blocks"]
    card = {"KILN_EMULATED_MEMORY": str(int(plan["usable_gib"] * GIB))}

    refused = recipe | advised | {"train.stream_blocks": 0}
    words = kiln(tmp_path, "run", "flux-lora", overrides=refused, code=1, api=api, more=card)
    assert "the device is too small: set what `kiln plan --gpu` advises" in words
    report = run_json(tmp_path, "flux-lora", recipe | advised, api, more=card)
    assert report["status"] == "published"
    folder = Path(report["model"])
    assert_drawn_alike(folder, Path(recipe["model.components"]))
    workflow = json.loads((folder / comfyui.WORKFLOW).read_text(encoding="utf-8"))
    (file,) = filter(None, (node["inputs"].get("lora_name") for node in workflow.values()))
    assert_mapped(folder / file, "flux")


def assert_drawn_alike(folder: Path, components: Path) -> None:
    """Assert that the published picture is that of diffusers with the adapters, to a level."""
    ours = np.asarray(Image.open(folder / comfyui.PICTURE)).astype(int)
    plain, theirs = (draw(components, folder if adapted else None) for adapted in (False, True))
    assert abs(theirs - ours).max() <= 1 < abs(plain - ours).max()


def draw(model: Path, adapters: Path | None) -> Any:
    """The first picture of the evaluation, by diffusers: [32, 32, 3]."""
    pipe = FluxPipeline.from_pretrained(model, torch_dtype=torch.float32)
    if adapters is not None:
        pipe.load_lora_weights(adapters, weight_name=LORA_WEIGHTS)
    noise = generator(0, Stream.PICTURE, 0).standard_normal((1, 8, 8, 8), dtype=np.float32)
    size = {"height": 32, "width": 32, "num_inference_steps": 2, "guidance_scale": 3.5}
    size["max_sequence_length"] = 20  # of the tiny T5
    drawn = pipe(PROMPT, latents=pack(torch.from_numpy(noise)), **size).images[0]
    return np.asarray(drawn).astype(int)
