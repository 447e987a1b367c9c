"""The smoke test: diffusers draws from the folder, or says why it cannot."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from diffusers import DiffusionPipeline, StableDiffusionPipeline, UNet2DConditionModel
from diffusers.pipelines.qwenimage import pipeline_qwenimage_edit_plus
from toy_recipes import digits, drawn_by
from transformers import CLIPImageProcessor

from configs.errors import Away
from configs.settings.data import FolderSource
from configs.settings.recipe import Recipe
from runtimes.pipeline_folder.folder import Base
from tasks.publish import smoke_test
from tasks.publish.model_card import Weights, write_card
from tasks.publish.smoke_test import files_fault
from tasks.trained_weights import BASE

pytestmark = pytest.mark.slow


def job_of(folder: Path, recipe: Recipe) -> dict[str, Any]:
    """The job for a pipeline with its card."""
    weights = Weights.of(BASE, Base.open(folder), folder, merged=False)
    measured: dict[str, Any] = {"metrics": {}, "differences": {}}
    card = write_card(recipe, folder, measured, [], {}, weights)
    (folder / "README.md").write_text(card, encoding="utf-8")
    return smoke_test.describe(folder, Base.open(folder), *drawn_by(recipe))


def test_a_picture_that_is_not_finite_fails_the_smoke_test(tmp_path: Path, tiny_sdxl: Path) -> None:
    folder = shutil.copytree(tiny_sdxl, tmp_path / "model")
    unet = UNet2DConditionModel.from_pretrained(folder / "unet")
    with torch.no_grad():
        unet.conv_out.weight.fill_(float("nan"))
    unet.save_pretrained(folder / "unet")
    with pytest.raises(ValueError, match="the picture is not finite"):
        smoke_test.draw(job_of(folder, digits(tmp_path)))


def test_the_code_of_the_card_is_what_draws_offline(tmp_path: Path, tiny_sdxl: Path) -> None:
    folder = Path(shutil.copytree(tiny_sdxl, tmp_path / "model"))
    recipe = digits(tmp_path, **{"evaluate.prompts.new.prompts": ["a\n```python\nraise OSError"]})
    job = job_of(folder, recipe)
    smoke_test.draw(job)
    card = (folder / "README.md").read_text(encoding="utf-8")

    def insert(line: str) -> None:
        code = card.replace("\nimage = pipe(", f"\n{line}\nimage = pipe(")
        (folder / "README.md").write_text(code, encoding="utf-8")

    insert("raise ValueError('the code fails')")
    with pytest.raises(ValueError, match="the code fails"):
        smoke_test.draw(job)
    insert("pipe.load_lora_weights('nobody/none')")
    fault = smoke_test.drawing_fault(folder, Base.open(folder), *drawn_by(recipe))
    assert fault is not None and "offline mode" in fault


def test_the_card_of_a_unet_with_extra_inputs_draws(
    tmp_path: Path, tiny_model: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A picture, a mask and aesthetic scores."""
    folder = Path(shutil.copytree(tiny_model("tiny-sd"), tmp_path / "model"))
    config = UNet2DConditionModel.load_config(folder / "unet")
    inputs = {"in_channels": 9, "class_embed_type": "timestep"}
    UNet2DConditionModel.from_config({**config, **inputs}).save_pretrained(folder / "unet")
    index = (folder / "model_index.json").read_text(encoding="utf-8")
    inpainting = index.replace("StableDiffusionPipeline", "StableDiffusionInpaintPipeline")
    (folder / "model_index.json").write_text(inpainting, encoding="utf-8")
    recipe = digits(tmp_path)
    extra = recipe.train.model_copy(update={"inpainting": True, "aesthetic_score": True})
    monkeypatch.setattr(smoke_test, "LARGEST_SIDE", 32)
    smoke_test.draw(job_of(folder, recipe.model_copy(update={"train": extra})))


class Blackens(torch.nn.Module):
    """Takes each picture for unsafe, as diffusers' checker may take noise."""

    def forward(self, clip_input: Any, images: Any) -> Any:
        return np.zeros_like(images), [True] * len(images)


def test_a_safety_checker_of_the_base_has_no_say(
    tmp_path: Path, tiny_model: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = Path(shutil.copytree(tiny_model("tiny-sd"), tmp_path / "model"))
    load = StableDiffusionPipeline.from_pretrained

    def with_checker(*given: Any, **named: Any) -> Any:
        pipe = load(*given, **named)
        pipe.safety_checker, pipe.feature_extractor = Blackens(), CLIPImageProcessor()
        return pipe

    monkeypatch.setattr(DiffusionPipeline, "from_pretrained", with_checker)
    monkeypatch.setattr(smoke_test, "LARGEST_SIDE", 32)
    smoke_test.draw(job_of(folder, digits(tmp_path)))


def test_the_smoke_test_has_the_packages_of_pythonpath(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tiny_sdxl: Path
) -> None:
    """As where packages are installed for one user, or by modules of a cluster."""
    (tmp_path / "path").mkdir()
    (tmp_path / "path/only_there.py").touch()
    (tmp_path / "script.py").write_text("import only_there; print('{}')")
    monkeypatch.setattr(smoke_test, "__file__", str(tmp_path / "script.py"))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "path"))
    assert (
        smoke_test.drawing_fault(tiny_sdxl, Base.open(tiny_sdxl), *drawn_by(digits(tmp_path)))
        is None
    )


@pytest.mark.parametrize(
    "name", ["tiny-flux", "tiny-flux-schnell", "tiny-sd3", "tiny-sd3-without-t5", "tiny-sd"]
)
@pytest.mark.parametrize(("free", "drawn_in"), [(10**9, "float32"), (10**5, "bfloat16")])
def test_every_family_passes_the_smoke_test_in_a_dtype_that_fits(
    name: str,
    free: int,
    drawn_in: str,
    tiny_model: Callable[[str], Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A FLUX transformer's config has no sample_size."""
    monkeypatch.setattr(smoke_test, "LARGEST_SIDE", 32)
    monkeypatch.setattr(smoke_test, "_free_bytes", lambda device: free)
    folder = Path(shutil.copytree(tiny_model(name), tmp_path / "model"))
    recipe = digits(tmp_path, **{"evaluate.dtype": "bfloat16"})
    loaded = []
    load = DiffusionPipeline.from_pretrained

    def spy(*given: Any, **more: Any) -> Any:
        loaded.append(load(*given, **more))
        assert {part.dtype for part in (loaded[0].vae, loaded[0].text_encoder)} == {torch.bfloat16}
        return loaded[0]

    monkeypatch.setattr(DiffusionPipeline, "from_pretrained", spy)
    smoke_test.draw(job_of(folder, recipe))
    (pipe,) = loaded
    assert {part.dtype for part in (pipe.vae, pipe.text_encoder)} == {getattr(torch, drawn_in)}


@pytest.mark.parametrize("name", ["tiny-flux-kontext", "tiny-flux2", "tiny-qwen-image-edit"])
def test_the_card_of_an_edit_model_draws_with_a_reference_in_its_size(
    name: str, tiny_model: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(smoke_test, "LARGEST_SIDE", 64)  # klein's pipeline refuses less
    monkeypatch.setattr(pipeline_qwenimage_edit_plus, "VAE_IMAGE_SIZE", 64 * 64)
    processor = transformers.Qwen2VLProcessor
    monkeypatch.setattr(processor, "__init__", processor.__init__)  # the script replaces it
    folder = Path(shutil.copytree(tiny_model(name), tmp_path / "model"))
    plain = digits(tmp_path, **{"evaluate.height": 48, "evaluate.width": 64})
    source = FolderSource(kind="folder", path=str(tmp_path), references="files")
    recipe = plain.model_copy(update={"source": source})
    job = job_of(folder, recipe)
    load = DiffusionPipeline.from_pretrained
    sizes = []

    def spy(*given: Any, **more: Any) -> Any:
        pipe = load(*given, **more)
        encode = pipe.vae.encode
        pipe.vae.encode = lambda pixels: sizes.append(pixels.shape[-2:]) or encode(pixels)
        return pipe

    monkeypatch.setattr(DiffusionPipeline, "from_pretrained", spy)
    smoke_test.draw(job)
    assert sizes == [(64, 64)], "one reference, in its own size"
    code = (folder / "README.md").read_text(encoding="utf-8")
    is_kontext = name == "tiny-flux-kontext"
    assert ("_auto_resize=False" in code and "max_area=3072" in code) == is_kontext
    job_of(folder, plain)
    assert "image=picture" not in (folder / "README.md").read_text(encoding="utf-8")


def test_free_memory_is_the_least_of_machine_container_and_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = [tmp_path / name for name in ("meminfo", "memory.max", "none")]
    files[0].write_text("MemTotal:  9000 kB\nMemAvailable:  2000 kB\n")
    places = [(str(p), *how[1:]) for p, how in zip(files, smoke_test.HOST_MEMORY, strict=False)]
    monkeypatch.setattr(smoke_test, "HOST_MEMORY", [*places, (str(files[2]), "", 1)])
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (700, 800))
    for limit, free in (("max\n", 2000 * 1024), ("1000\n", 1000)):
        files[1].write_text(limit)
        assert smoke_test._free_bytes("cpu") == free and smoke_test._free_bytes("cuda") == 700


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("import os; os.kill(os.getpid(), 9)", "smoke test: killed by SIGKILL: run again"),
        ("raise RuntimeError('CUDA out of memory. Tried')", "CUDA out of memory.*: run again"),
        ("raise RuntimeError('CUDA error: devices are busy or unavailable')", "busy.*: run again"),
        ("raise MemoryError", "smoke test: MemoryError: run again"),
        ("raise OSError(12, 'Cannot allocate memory')", "Cannot allocate memory: run again"),
        ("raise ImportError('a.so: failed to map segment')", "a.so: failed to map.*: run again"),
        (
            "try: raise RuntimeError('DefaultCPUAllocator: can\\'t allocate memory: you tried')\n"
            "except RuntimeError: raise OSError('Unable to load weights')",
            "DefaultCPUAllocator.*: run again",
        ),
        ("import time; time.sleep(60)", "smoke test: no picture after 1 s: run again"),
    ],
    ids=["killed", "memory", "device", "MemoryError", "errno", "import", "wrapped", "time"],
)
def test_a_smoke_test_that_could_not_end_is_no_verdict(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, said: str
) -> None:
    """A rejected model is never trained again on the same rows."""
    monkeypatch.setattr(smoke_test, "__file__", str(tmp_path / "script.py"))
    monkeypatch.setattr(smoke_test, "SECONDS", 1 if "sleep" in script else 60)
    (tmp_path / "script.py").write_text(script)
    (tmp_path / "model_index.json").write_text('{"_class_name": "StableDiffusionPipeline"}')
    with pytest.raises(Away, match=said):
        smoke_test.drawing_fault(tmp_path, Base.open(tmp_path), *drawn_by(digits(tmp_path)))


def test_a_folder_with_pickles_or_too_many_bytes_is_rejected(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "weights.safetensors").write_bytes(bytes(100))
    assert files_fault(folder, 99) == "100 bytes exceed publish.max_bytes (99)"
    assert files_fault(folder, 100) is None
    for name in ("weights.bin", "WEIGHTS.PKL"):
        (folder / name).write_bytes(b"")
        assert files_fault(folder, None) == f"{name} is no safetensors file"
        (folder / name).unlink()
