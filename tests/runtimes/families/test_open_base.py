"""A pipeline's folder is opened once, as an object."""

import json
import shutil
from pathlib import Path

import pytest

from configs.errors import Refused
from runtimes.pipeline_folder.folder import Base
from runtimes.process.job import EncodeJob


def test_opening_reads_the_index_alone(tmp_path: Path) -> None:
    index = {"_class_name": "StableDiffusionPipeline"}
    (tmp_path / "model_index.json").write_text(json.dumps(index))
    base = Base.open(tmp_path)
    assert base.family.name == "sd" and base.index == index
    with pytest.raises(Refused, match=r"unet/config\.json: not there"):
        assert base.denoiser
    with pytest.raises(Refused, match=r"vae/config\.json: not there"):
        assert base.encoders


def test_a_config_is_read_once(tiny_sd: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(tiny_sd, tmp_path / "copy"))
    base = Base.open(copy)
    before = base.denoiser, base.scheduler, base.encoders
    shutil.rmtree(copy)
    assert (base.denoiser, base.scheduler, base.encoders) == before


def test_the_vae_is_the_pipelines_own_or_another_ones(
    tiny_sd: Path, tiny_sdxl: Path, tiny_vae: Path
) -> None:
    assert Base.open(tiny_sd).vae == tiny_sd / "vae"
    for given, vae in ((tiny_vae, tiny_vae), (tiny_sdxl, tiny_sdxl / "vae")):
        base = Base.open(tiny_sd, given)
        assert base.vae == base.part("vae") == base.vae_folder == vae


def test_a_job_opens_the_same_base(tiny_sd: Path, tiny_vae: Path) -> None:
    for base in (Base.open(tiny_sd), Base.open(tiny_sd, tiny_vae)):
        assert Base.of(EncodeJob("torch", **base.job_fields)) == base
