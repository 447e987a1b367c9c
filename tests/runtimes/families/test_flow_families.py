"""FLUX.2, Z-Image and Qwen-Image: encoded, trained, drawn and stored as diffusers does it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flow_families import (
    FlowFamily,
    WriteLatents,
    assert_a_run_moves_to_jax_and_back,
    assert_adapters_load,
    assert_drawn_measured_and_published,
    assert_figures_of_case,
    assert_jax_encodes_as_torch,
    assert_pictures,
    cases,
    job_maker,
    tiered,
)
from flow_families_of_diffusers import FLUX2, QWEN_IMAGE, Z_IMAGE
from jobs import MakeJob

pytestmark = pytest.mark.slow
FAMILIES = (FLUX2, Z_IMAGE, QWEN_IMAGE)
CASES = {one.name: cases(one.trained.targets) for one in FAMILIES}
of_each = pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)


@pytest.fixture
def model(request: pytest.FixtureRequest, family: FlowFamily) -> Path:
    folder: Path = request.getfixturevalue(f"tiny_{family.name}")
    return folder


@pytest.fixture
def flow_job(
    family: FlowFamily, make_job: MakeJob, write_latents: WriteLatents, tmp_path: Path
) -> MakeJob:
    """`flow_job(model, **settings)`: a job on pictures of two shapes."""
    return job_maker(make_job, write_latents, tmp_path, **family.trained.info)


@pytest.mark.parametrize(
    ("family", "case"),
    [
        pytest.param(one, *case.values, marks=case.marks, id=f"{one.name}-{case.values[0]}")
        for one in FAMILIES
        for case in tiered(CASES[one.name], one.trained.in_soak)
    ],
)
def test_twenty_steps_have_the_figures_of_diffusers_script(
    family: FlowFamily, case: str, flow_job: MakeJob, model: Path
) -> None:
    job, trained = flow_job(model, **CASES[family.name][case]), family.trained
    assert_figures_of_case(job, trained.script_of(job), case, trained.targets)


@pytest.mark.parametrize("family", [Z_IMAGE, QWEN_IMAGE], ids=lambda family: family.name)
def test_jax_encodes_as_torch_does(family: FlowFamily, model: Path) -> None:
    assert_jax_encodes_as_torch(model, family.prompts)


@of_each
def test_pictures_are_those_of_diffusers(family: FlowFamily, model: Path, tmp_path: Path) -> None:
    """PyTorch's to the bit, jax's within a level, with and without a negative prompt."""
    assert_pictures(family, model, tmp_path)
    pipe = family.pipeline.from_pretrained(model)

    def drawn(prompts: tuple[str, ...] = family.prompts, **changes: Any) -> Any:
        return family.of_diffusers(pipe, prompts, **changes)

    expected = drawn()
    assert np.abs(drawn(family.prompts[::-1]) - expected).max() > 5, "by other prompts"
    assert np.abs(drawn(**family.plain) - expected).max() > 2, "by guidance"
    assert np.abs(drawn(**family.grey(model)) - expected).max() > 1, "by the negative prompt"
    given = {"ours": {"negative_prompt": "grey"}, "theirs": family.grey(model)}
    assert_pictures(family, model, tmp_path / "negative", **given)


@pytest.mark.extended
@of_each
def test_jax_trains_as_torch_does_and_a_run_moves_there_and_back(
    family: FlowFamily, flow_job: MakeJob, model: Path
) -> None:
    assert_a_run_moves_to_jax_and_back(flow_job, model, ema_decay=0.9)


@of_each
def test_a_trained_transformer_is_drawn_measured_and_published(
    family: FlowFamily, flow_job: MakeJob, model: Path, tmp_path: Path
) -> None:
    assert_drawn_measured_and_published(family, flow_job(model), tmp_path)


@of_each
@pytest.mark.parametrize("dora", [False, True])
def test_adapters_load_in_diffusers_in_both_layouts(
    family: FlowFamily, flow_job: MakeJob, model: Path, tmp_path: Path, dora: bool
) -> None:
    adapters = {"rank": 3, "alpha": 5.0, "dora": dora}
    job = flow_job(model, method="lora", lora=adapters, learning_rate=1e-2)
    assert_adapters_load(family, job, tmp_path, kohya=not dora, count=family.trained.adapted)
