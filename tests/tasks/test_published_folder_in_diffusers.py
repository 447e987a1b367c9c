"""Published folders draw in plain diffusers, in a process without our code."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors import safe_open
from tiny_adapters import make_lora

from runtimes.adapters.lora_file_format import LORA_WEIGHTS
from tasks.publish.assemble_pipeline import assemble
from tasks.publish.write_adapters import write_adapters

#: Draws with the pipeline argv[1] in each dtype, then with the adapters argv[2].
DRAW = """
import sys
import numpy, torch
from diffusers import DiffusionPipeline
for dtype in (None, torch.float16, torch.bfloat16, "auto"):
    pipe = DiffusionPipeline.from_pretrained(sys.argv[1], **({"dtype": dtype} if dtype else {}))
    pipe.set_progress_bar_config(disable=True)
    parts = [part for part in pipe.components.values() if isinstance(part, torch.nn.Module)]
    (found,) = {part.dtype for part in parts}
    assert found == (dtype if isinstance(dtype, torch.dtype) else torch.float32), (dtype, found)
    start = torch.zeros(1, 4, 8, 8, dtype=found)
    for adapters in (False, True):
        if adapters:
            pipe.load_lora_weights(sys.argv[2])
            assert pipe.get_active_adapters() == ["default_0"]
        drawn = pipe("a fox", latents=start, num_inference_steps=1, height=32, width=32,
                     output_type="np").images
        assert numpy.isfinite(drawn).all() and drawn.std() > 0
"""


def draw_in_a_clean_process(*folders: Path) -> None:
    environment = {n: v for n, v in os.environ.items() if n not in ("PYTHONPATH", "HF_ENDPOINT")}
    done = subprocess.run(
        [sys.executable, "-P", "-c", DRAW, *map(str, folders)],
        env=environment | {"HF_HUB_OFFLINE": "1"},
        cwd="/",
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr


def half_base(base: Path, out: Path) -> Path:
    """A copy of a base whose text encoders' configs name float16, as on the hub."""
    shutil.copytree(base, out)
    for name, key in (("text_encoder", "torch_dtype"), ("text_encoder_2", "dtype")):
        path = out / name / "config.json"
        config = json.loads(path.read_text(encoding="utf-8"))
        config.pop("dtype")
        path.write_text(json.dumps({**config, key: "float16"}), encoding="utf-8")
    return out


@pytest.mark.slow
def test_half_precision_files_draw_bare_and_in_any_dtype_with_and_without_adapters(
    tiny_sdxl: Path, tmp_path: Path
) -> None:
    model, adapters = tmp_path / "model", tmp_path / "adapters"
    lora = make_lora(tmp_path / "lora.safetensors")
    assemble(half_base(tiny_sdxl, tmp_path / "base"), {}, model, dtype="float16")
    write_adapters(lora, tiny_sdxl, adapters, name="x", dtype="float16", scheduler=None)
    for path in (model / "text_encoder/model.safetensors", adapters / LORA_WEIGHTS):
        with safe_open(path, "pt") as stored:
            assert {stored.get_slice(name).get_dtype() for name in stored.keys()} == {"F16"}  # noqa: SIM118
    for part in ("text_encoder", "text_encoder_2", "unet", "vae"):
        config = json.loads((model / part / "config.json").read_text(encoding="utf-8"))
        assert "torch_dtype" not in config
        assert config.get("dtype") == ("float32" if "text" in part else None)
    draw_in_a_clean_process(model, adapters)
