"""Fixtures of the test family `patchwork`: its plug-in and a tiny pipeline."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

MADE_UP = Path(__file__).with_name("made_up")


@pytest.fixture
def plugged_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Install the plug-in, a package with an entry point, for this process and its children."""
    from runtimes import families

    record = tmp_path / "site" / "patchwork-1.0.dist-info"
    record.mkdir(parents=True)
    (record / "METADATA").write_text("Metadata-Version: 2.1\nName: patchwork\nVersion: 1.0\n")
    entry = f"[{families.PLUG_INS}]\npatchwork = patchwork:FAMILY\n"
    (record / "entry_points.txt").write_text(entry)
    for folder in (MADE_UP, record.parent):
        monkeypatch.syspath_prepend(str(folder))
        monkeypatch.setenv("PYTHONPATH", str(folder), prepend=os.pathsep)
    families._plugged_in.cache_clear()
    yield
    families._plugged_in.cache_clear()


@pytest.fixture(scope="session")
def patchwork(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pipeline folder of the family: 32 x 32 pictures, 8 latent channels, 2 x 2 patches."""
    import tiny_models
    import torch
    from diffusers import FlowMatchEulerDiscreteScheduler, FluxPipeline, FluxTransformer2DModel
    from transformers import CLIPTextModel

    torch.manual_seed(5)
    pipeline = FluxPipeline(
        transformer=FluxTransformer2DModel(
            in_channels=32,
            num_layers=1,
            num_single_layers=1,
            attention_head_dim=16,
            num_attention_heads=2,
            joint_attention_dim=80,
            pooled_projection_dim=32,
            guidance_embeds=True,
            axes_dims_rope=(4, 6, 6),
        ),
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
        vae=tiny_models.make_vae(latent_channels=8, shift_factor=0.1),
        text_encoder=CLIPTextModel(tiny_models.make_text_config()),
        tokenizer=tiny_models.make_tokenizer(),
        text_encoder_2=tiny_models.make_t5(),
        tokenizer_2=tiny_models.make_t5_tokenizer(),
    )
    with torch.no_grad():  # else the prompt has little effect with random weights
        pipeline.transformer.context_embedder.weight *= 8
        pipeline.transformer.proj_out.weight *= 8
    folder = tmp_path_factory.mktemp("patchwork")
    pipeline.save_pretrained(folder)
    index = folder / "model_index.json"
    index.write_text(index.read_text().replace('"FluxPipeline"', '"PatchworkPipeline"'))
    return folder
