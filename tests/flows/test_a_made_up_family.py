"""A family that is one file goes through the whole flow: tests/made_up/patchwork.py."""

from collections.abc import Callable
from pathlib import Path

import chips
import in_process
import picture_sources
import published
import pytest
from toy_recipes import toy


@pytest.mark.extended
@pytest.mark.slow
@pytest.mark.parametrize("runtime", ["torch", pytest.param("jax", marks=pytest.mark.soak)])
@pytest.mark.usefixtures("plugged_in")
def test_a_run_is_published(
    runtime: str, patchwork: Path, tmp_path: Path, api: str, tiny_model: Callable[[str], Path]
) -> None:
    import torch
    from diffusers import FluxPipeline, FluxTransformer2DModel

    chips.require(runtime)
    picture_sources.write_folder(tmp_path / "pictures", picture_sources.make_pictures())
    source = {"kind": "folder", "path": str(tmp_path / "pictures")}
    overrides = toy("sd2", tmp_path / "store", source, tiny_model)
    overrides |= {"model.path": str(patchwork), "runtime": runtime, "train.snr_gamma": None}
    overrides |= {"train.mixed_precision": "no", "train.gradient_checkpointing": "none"}
    report = in_process.finetune(tmp_path, "sd2", overrides, api)
    published.assert_published(report, runtime, 4)
    loaded = FluxPipeline.from_pretrained(report["model"])
    before = FluxTransformer2DModel.from_pretrained(patchwork / "transformer").state_dict()
    moved = loaded.transformer.state_dict()
    assert any(not torch.equal(moved[name], array) for name, array in before.items())
