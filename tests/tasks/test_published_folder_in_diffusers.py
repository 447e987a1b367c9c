"""Published folders draw in plain diffusers, in a process without our code."""

import json
import os
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from kiln_command import ROOT, python
from safetensors import safe_open
from tiny_adapters import make_lora
from toy_recipes import digits, drawn_by

from runtimes.adapters.lora import LORA_WEIGHTS
from runtimes.pipeline_folder.folder import Base
from tasks.publish import smoke_test
from tasks.publish.assemble import assemble, write_adapters
from tasks.publish.model_card import Weights, write_card
from tasks.trained_weights import TrainedWeights

#: Packages of requirements/oldest.txt: `make setup-oldest`.
OLDEST = Path(sys.prefix).with_name(f"{Path(sys.prefix).name}-oldest")
#: Draws with the pipeline argv[1] in each dtype, then with the adapters argv[2], into argv[3].
DRAW = """
import sys
import diffusers, numpy, torch
from diffusers import DiffusionPipeline
old = diffusers.__version__ < "0.36"
pictures = {}
for dtype in (None, torch.float16, torch.bfloat16, None if old else "auto"):
    chosen = {"torch_dtype" if old else "dtype": dtype} if dtype else {}
    pipe = DiffusionPipeline.from_pretrained(sys.argv[1], **chosen)
    pipe.set_progress_bar_config(disable=True)
    parts = [part for part in pipe.components.values() if isinstance(part, torch.nn.Module)]
    (found,) = {part.dtype for part in parts}
    assert found == (dtype if isinstance(dtype, torch.dtype) else torch.float32), (dtype, found)
    start = torch.zeros(1, 4, 8, 8, dtype=found)
    for adapters in (False, True):
        if adapters:
            pipe.load_lora_weights(sys.argv[2], weight_name="pytorch_lora_weights.safetensors")
            assert pipe.get_active_adapters() == ["default_0"]
        drawn = pipe("a fox", latents=start, num_inference_steps=1, height=32, width=32,
                     output_type="np").images
        assert numpy.isfinite(drawn).all() and drawn.std() > 0
        pictures[f"{found} {adapters}"] = drawn
numpy.savez(sys.argv[3], **pictures)
"""


def draw_in_a_clean_process(model: Path, adapters: Path, packages: Path | None = None) -> Any:
    """Pictures [1, 32, 32, 3] in [0, 1], by dtype and whether they are drawn with the adapters.

    Args:
        packages: folder of packages that replace those of the environment.
    """
    environment = {n: v for n, v in os.environ.items() if n not in ("PYTHONPATH", "HF_ENDPOINT")}
    environment |= {} if packages is None else {"PYTHONPATH": str(packages)}
    out = model.parent / "pictures.npz"
    words = ["-P", "-c", DRAW, *map(str, (model, adapters, out))]
    done = python(*words, env=environment | {"HF_HUB_OFFLINE": "1"}, cwd=Path("/"))
    assert done.returncode == 0, done.stderr
    return dict(np.load(out))


def half_base(base: Path, out: Path) -> Path:
    """A copy of a base whose text encoders' configs name float16, as on the hub.

    Its tokenizers have the files that transformers 4 reads.
    """
    shutil.copytree(base, out)
    for name in ("tokenizer", "tokenizer_2"):
        found = json.loads((out / name / "tokenizer.json").read_text(encoding="utf-8"))["model"]
        (out / name / "vocab.json").write_text(json.dumps(found["vocab"]), encoding="utf-8")
        merges = "\n".join(["#version: 0.2", *(" ".join(pair) for pair in found["merges"])])
        (out / name / "merges.txt").write_text(merges, encoding="utf-8")
    for name, key in (("text_encoder", "torch_dtype"), ("text_encoder_2", "dtype")):
        path = out / name / "config.json"
        config = json.loads(path.read_text(encoding="utf-8"))
        config.pop("dtype")
        path.write_text(json.dumps({**config, key: "float16"}), encoding="utf-8")
    return out


@pytest.fixture
def published(tiny_sdxl: Path, tmp_path: Path) -> tuple[Path, Path]:
    """A published pipeline and published adapters, in half precision."""
    model, adapters = tmp_path / "model", tmp_path / "adapters"
    lora = make_lora(tmp_path / "lora.safetensors")
    base = Base.open(half_base(tiny_sdxl, tmp_path / "base"))
    assemble(base, {}, model, dtype="float16")
    write_adapters(lora, Base.open(tiny_sdxl), adapters, name="x", dtype="float16", scheduler=None)
    return model, adapters


@pytest.mark.extended
@pytest.mark.slow
def test_half_precision_files_draw_bare_and_in_any_dtype_with_and_without_adapters(
    published: tuple[Path, Path],
) -> None:
    model, adapters = published
    for path in (model / "text_encoder/model.safetensors", adapters / LORA_WEIGHTS):
        with safe_open(path, "pt") as stored:
            assert {stored.get_slice(name).get_dtype() for name in stored.keys()} == {"F16"}  # noqa: SIM118
    for part in ("text_encoder", "text_encoder_2", "unet", "vae"):
        config = json.loads((model / part / "config.json").read_text(encoding="utf-8"))
        assert "torch_dtype" not in config
        assert config.get("dtype") == ("float32" if "text" in part else None)
    draw_in_a_clean_process(model, adapters)


@pytest.mark.soak
@pytest.mark.skipif(not OLDEST.is_dir(), reason=f"no {OLDEST.name}: make setup-oldest")
def test_the_oldest_supported_versions_draw_what_the_pinned_ones_draw(
    published: tuple[Path, Path],
) -> None:
    now, oldest = (draw_in_a_clean_process(*published, packages) for packages in (None, OLDEST))
    assert now.keys() == oldest.keys() and len(now) == 6
    for name, picture in now.items():
        atol = 1e-4 if "float32" in name else 0.05
        np.testing.assert_allclose(oldest[name], picture, atol=atol, err_msg=name)


@pytest.mark.extended
@pytest.mark.slow
@pytest.mark.parametrize(
    "packages",
    [
        None,
        pytest.param(
            OLDEST,
            marks=[
                pytest.mark.soak,
                pytest.mark.skipif(not OLDEST.is_dir(), reason=f"no {OLDEST.name}"),
            ],
        ),
    ],
    ids=["pinned", "oldest"],
)
def test_the_code_of_cards_and_pages_draws_offline(
    packages: Path | None,
    published: tuple[Path, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    base = tmp_path / "base"
    recipe = digits(tmp_path, **{"model.path": str(base)})
    registry = tmp_path / "store/registry"
    monkeypatch.setenv("PYTHONPATH", str(packages or ""))
    for folder, lora, name in zip(published, (None, base), ("digits", "mine"), strict=True):
        weights = Weights.of(TrainedWeights(lora=lora), Base.open(base), folder, merged=False)
        card = write_card(recipe, base, {"metrics": {}, "differences": {}}, [], {}, weights)
        (folder / "README.md").write_text(card, encoding="utf-8")
        assert smoke_test.drawing_fault(folder, Base.open(base), *drawn_by(recipe)) is None
        (registry / name).mkdir(parents=True)
        (registry / name / "champion").symlink_to(folder)
    page, readme = (
        (ROOT / name).read_text(encoding="utf-8") for name in ("docs/publishing.md", "README.md")
    )
    block = page.partition("```python\n")[2].partition("```")[0]
    (loading,) = re.findall(r"`(pipe\.load_lora_weights\(.+?\))`", readme)
    code = f"import torch\nfrom diffusers import DiffusionPipeline\n{block}\n{loading}\n"
    environment = os.environ | {"HF_HUB_OFFLINE": "1"}
    done = python("-P", "-c", code, env=environment, cwd=tmp_path)
    assert done.returncode == 0, done.stderr


def test_text_encoders_have_the_names_that_every_transformers_reads(
    published: tuple[Path, Path],
) -> None:
    for part in ("text_encoder", "text_encoder_2"):
        with safe_open(published[0] / part / "model.safetensors", "pt") as stored:
            names = set(stored.keys())
        others = {name for name in names if not name.startswith("text_model.")}
        assert names and others <= {"text_projection.weight"}
