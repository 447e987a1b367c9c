"""What every runtime must train alike: the same losses, norms and weights, whoever goes on.

A new runtime is a name in `runtimes.registry.RUNTIMES` and in `chips.VARIANTS`; another kind of
device of one, a name in `chips.VARIANTS`.
"""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import chips
import numpy as np
import pytest
from altered_rows import of_rows
from conformance import golden
from conformance.conftest import MakeJob, Subject
from conformance.runs import (
    Once,
    assert_close,
    assert_follows,
    plain_adapters,
    plain_denoiser,
    reference,
    result,
    run_of_torch,
    skip_unless_known,
    subjects,
    subjects_and_families,
    train_here,
)
from tolerances import NORM
from training import history, roll_back

from runtimes.adapters.lora_files import LORA_WEIGHTS
from runtimes.contract import OPTIONAL
from runtimes.train.checkpoints import Checkpoints

pytestmark = pytest.mark.slow
#: Adam's first step is the gradient's sign, with the default epsilon even where the gradient is a
#: rounding error. Such weights of Z-Image and Qwen-Image would differ between runtimes.
LARGE_EPSILON = {"adam_epsilon": 1e-6}
OBJECTIVES: dict[str, dict[str, Any]] = {
    "sd": {
        "micro_batch_size": 4,
        **{"prediction_type": "v_prediction", "zero_terminal_snr": True, "snr_gamma": 5.0},
        **{"inpainting": True, "aesthetic_score": True},
    },
    "sdxl": {
        **{"noise_offset": 0.05, "snr_gamma": 5.0, "gradient_checkpointing": "blocks"},
        "ema_every_n_steps": 3,
    },
    "sd3": {"timesteps": {"distribution": "logit_normal"}},
    "flux": {
        **{"guidance_scale": 3.5, "timesteps": {"resolution_shift": True}},
        "gradient_checkpointing": "blocks",
    },
    "flux2": {
        **{"timesteps": {"resolution_shift": True}, "gradient_checkpointing": "blocks"},
        **LARGE_EPSILON,
    },
    "z_image": {"gradient_checkpointing": "blocks", **LARGE_EPSILON},
    "qwen_image": {
        **{"timesteps": {"distribution": "logit_normal"}, "gradient_checkpointing": "blocks"},
        **LARGE_EPSILON,
    },
}
LORA: dict[str, Any] = {"method": "lora", "lora": {"rank": 4, "alpha": 8.0}, "learning_rate": 1e-2}
TEXT_LORA = {**LORA, "train_text_encoder": True, "text_encoder_lr": 5e-3}
HALF = {"mindspore": "float16"}  # MindSpore's CPU backend has no bfloat16


@subjects_and_families(extended="hpu-eager")
def test_twenty_steps_follow_the_reference_and_a_resume_ends_with_the_same_bits(
    runtime: Subject, family: str, make_job: MakeJob, once: Once
) -> None:
    skip_unless_known(runtime.name, family)
    job = make_job(runtime.name, family, **OBJECTIVES[family])
    expected, weights = reference(once, family, lambda: plain_denoiser(job))
    assert runtime.run(job) == 0
    assert_follows(job, expected)
    golden.check(runtime.name, f"{family} full", "float32", history(job))
    whole, lines = result(job), history(job)
    assert_close(next(iter(whole.values())), weights)

    if family != runtime.on.families[0]:
        return  # what others resume by is no different
    roll_back(job, 16)
    assert runtime.run(job) == 16
    assert history(job) == lines
    resumed = result(job)
    for name, arrays in whole.items():
        np.testing.assert_equal(resumed[name], arrays)


@subjects(only="cuda")
@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({"compile": "none"}, id="eager"),
        pytest.param({"compile": "none", "micro_batch_size": 3}, id="micro-batches"),
        pytest.param({"compile": "none", **LORA}, id="lora"),
        pytest.param({}, id="compiled"),
    ],
)
def test_cuda_graphs_change_no_bits(
    runtime: Subject, make_job: MakeJob, settings: dict[str, Any]
) -> None:
    """Images are drawn after step 10, which frees the graphs."""
    given = {"snr_gamma": 5.0, "sample_every_n_steps": 10, **settings}
    sampler = {"seed": 5, "num_inference_steps": 2, "guidance_scale": 3.0, "batch_size": 1}
    drawn = {"sample_prompts": ("a red cat",), "sampler": {**sampler, "height": 32, "width": 32}}
    jobs = (make_job(runtime.name, name=f"{on}", cuda_graphs=on, **given) for on in (False, True))
    plain, graphs = (replace(job, **drawn) for job in jobs)
    assert runtime.run(plain) == runtime.run(graphs) == 0
    assert history(graphs) == history(plain)
    for name, arrays in result(plain).items():
        np.testing.assert_equal(result(graphs)[name], arrays)


@subjects(only="torch npu cuda", soak="npu")
@pytest.mark.parametrize("precision", [None, "int8", "nf4"])
def test_streamed_blocks_change_no_bits(
    runtime: Subject, make_job: MakeJob, precision: str | None
) -> None:
    lora = {**LORA, "lora": {**LORA["lora"], "base_precision": precision}}
    resident, streamed = (
        make_job(
            runtime.name, name=str(n), gradient_checkpointing="blocks", stream_blocks=n, **lora
        )
        for n in (0, 99)
    )
    assert runtime.run(resident) == runtime.run(streamed) == 0
    assert history(streamed) == history(resident)
    np.testing.assert_equal(result(streamed)[LORA_WEIGHTS], result(resident)[LORA_WEIGHTS])


@subjects(without="torch", extended="xla mindspore hpu-lazy", soak="hpu-eager npu")
def test_a_run_goes_to_another_runtime_and_back(
    runtime: Subject, make_job: MakeJob, once: Once, tmp_path: Path
) -> None:
    settings = OBJECTIVES["sdxl"]
    expected, weights = reference(
        once, "sdxl", lambda: plain_denoiser(make_job("torch", **settings))
    )
    of_torch = run_of_torch(once, "sdxl", lambda f: make_job("torch", name=f, **settings))
    shutil.copytree(of_torch, tmp_path / "run")
    there, back = make_job(runtime.name, **settings), make_job("torch", **settings)
    roll_back(there, 8)
    assert runtime.run(there) == 8
    roll_back(back, 16)
    assert train_here(back) == 16
    assert_follows(back, expected)
    assert_close(next(iter(result(back).values())), weights)


@subjects(extended="jax xla mindspore", soak="hpu-eager hpu-lazy npu")
def test_a_mixture_follows_the_reference_and_resumes(
    runtime: Subject, make_job: MakeJob, mixture: str, once: Once
) -> None:
    """Sources with weights of their own, of the samples and of the loss."""
    plain = {"weight": 3.0, "repeats": None, "loss_weight": 1.0, "regularisation": None}
    sources = {
        "old": {**plain, "weight": 1.0, "loss_weight": 0.25, "caption_dropout_rate": 0.9},
        "subject": {**plain, "caption_dropout_rate": None},
    }
    job = make_job(runtime.name, **OBJECTIVES["sdxl"])
    job = replace(job, latents=mixture, mixture=sources)
    expected, weights = reference(once, "mixture", lambda: plain_denoiser(job))
    assert runtime.run(job) == 0
    assert_follows(job, expected)
    assert_close(next(iter(result(job).values())), weights)
    lines = history(job)
    roll_back(job, 16)
    assert runtime.run(job) == 16
    assert history(job) == lines


@subjects(soak="jax xla mindspore hpu-eager hpu-lazy npu")
def test_adapters_follow_the_reference_and_resume(
    runtime: Subject, make_job: MakeJob, once: Once
) -> None:
    job = make_job(runtime.name, gradient_checkpointing="blocks", **LORA)
    expected, plain = reference(once, "lora", lambda: plain_adapters(job))
    assert runtime.run(job) == 0
    assert_follows(job, expected)
    golden.check(runtime.name, "sdxl lora", "float32", history(job))
    weights = {f"unet.{n.replace('.default.', '.')}": a for n, a in plain.items()}
    whole = result(job)[LORA_WEIGHTS]
    assert len(whole) == len(weights) > 0
    assert_close(whole, weights)

    roll_back(job, 8)
    assert runtime.run(job) == 8
    np.testing.assert_equal(result(job)[LORA_WEIGHTS], whole)

    still = {**LORA, "learning_rate": 1e-30, "steps": 1, "gradient_checkpointing": "blocks"}
    start = make_job(runtime.name, name="start", **still)
    runtime.run(replace(start, adapters=f"{job.out}/{LORA_WEIGHTS}"))
    for name, array in result(start)[LORA_WEIGHTS].items():
        np.testing.assert_allclose(array, whole[name], atol=1e-25, rtol=0, err_msg=name)


@pytest.mark.soak
@pytest.mark.parametrize("family", ["sd", "sd3", "flux", *chips.LLM_FAMILIES])
@subjects(only="torch")
def test_adapters_of_other_families_follow_the_reference(
    runtime: Subject, family: str, make_job: MakeJob, once: Once
) -> None:
    job = make_job(runtime.name, family, **LORA)
    expected, _ = reference(once, f"lora-{family}", lambda: plain_adapters(job))
    runtime.run(job)
    assert_follows(job, expected)
    golden.check(runtime.name, f"{family} lora", "float32", history(job))


@subjects(extended="jax hpu-lazy", soak="xla mindspore hpu-eager npu")
def test_text_encoders_with_adapters_are_trained_as_torch_does(
    runtime: Subject, make_job: MakeJob, once: Once
) -> None:
    def of_torch(folder: str) -> Any:
        return make_job("torch", name=folder, **TEXT_LORA)

    expected = of_torch(str(run_of_torch(once, "text-lora", of_torch)))
    job = make_job(runtime.name, **TEXT_LORA)
    runtime.run(job)
    assert_follows(job, history(expected))
    golden.check(runtime.name, "sdxl lora with text encoders", "float32", history(job))
    weights = result(expected)[LORA_WEIGHTS]
    assert any(name.startswith("text_encoder_2.") for name in weights)
    assert_close(result(job)[LORA_WEIGHTS], weights)


@subjects(without="hpu-eager hpu-lazy npu", soak="jax xla mindspore")
def test_half_precision_stays_where_it_was(runtime: Subject, make_job: MakeJob) -> None:
    dtype = HALF.get(runtime.name, "bfloat16")
    job = make_job(
        runtime.name,
        mixed_precision={"bfloat16": "bf16", "float16": "fp16"}[dtype],
        **OBJECTIVES["sdxl"],
    )
    runtime.run(job)
    golden.check(runtime.name, "sdxl full", dtype, history(job))


@pytest.mark.parametrize("method", ["lora", pytest.param("full", marks=pytest.mark.soak)])
@subjects(soak="hpu-eager hpu-lazy npu")
def test_masks_huber_and_prior_targets_follow_a_reference_with_two_models(
    runtime: Subject, make_job: MakeJob, method: str
) -> None:
    settings: dict[str, Any] = {"steps": 3, "micro_batch_size": 4, "lr_scheduler": "constant"}
    settings |= {"lr_warmup_steps": 0, **(LORA if method == "lora" else {})}
    job = make_job(runtime.name, **settings)
    plain = (plain_adapters if method == "lora" else plain_denoiser)(job)
    plain.batch = of_rows(plain.batch)
    expected = [figure for step in range(3) for figure in plain.step(step).values()]
    job = replace(job, mixture={"old": {"regularisation": "prior"}})
    assert runtime.rows(job, OPTIONAL) == pytest.approx(expected, rel=NORM)


@pytest.mark.soak
@subjects(without="xla cuda")
def test_several_processes_follow_the_reference(
    runtime: Subject, make_job: MakeJob, once: Once
) -> None:
    """Those of torch are also held to one process, by tests/runtimes/torch/test_parallel.py."""
    job = make_job(runtime.name, steps=8, **chips.MULTI_PROCESS[runtime.name])
    expected, _ = reference(once, "eight-steps", lambda: plain_denoiser(job))
    runtime.run_alone(job)
    assert_follows(job, expected)


@subjects(without="xla cuda mindspore hpu-eager hpu-lazy npu", soak="torch jax")
def test_processes_that_share_arrays_resume_to_the_same_bits(
    runtime: Subject, make_job: MakeJob
) -> None:
    settings: dict[str, Any] = {"processes": 2, "fsdp": 2}
    job = make_job(runtime.name, steps=8, checkpointing_steps=4, **settings)
    runtime.run_alone(job)
    whole = result(job)
    roll_back(job, 4)
    assert runtime.run_alone(job) == 4
    resumed = result(job)
    for name, arrays in whole.items():
        np.testing.assert_equal(resumed[name], arrays)


@pytest.mark.soak
@subjects(without="torch")
def test_the_best_checkpoint_is_published(runtime: Subject, make_job: MakeJob) -> None:
    """The loss falls, so the rule asks for the highest one, that of the first checkpoint."""
    settings: dict[str, Any] = {"learning_rate": 0.1, "lr_warmup_steps": 0, "ema_decay": 0.5}
    settings |= {"steps": 4, "checkpointing_steps": 2, "holdout_loss": {"every_n_steps": 2}}
    job = make_job(runtime.name, **settings, best_checkpoint={"mode": "max"})
    runtime.run(job)
    losses = {line["step"]: line.get("validation_loss") for line in history(job)}
    assert losses[2] > losses[4]
    best = Checkpoints(job.work, 9).read(2).state["ema"]
    (published,) = result(job).values()
    for name, array in published.items():
        np.testing.assert_array_equal(array, best[f"unet.{name}"][...], err_msg=name)


@subjects(soak="hpu-eager")
def test_wrong_weights_are_named_before_anything_is_written(
    runtime: Subject, make_job: MakeJob, tmp_path: Path
) -> None:
    """That a stage hears of it as Refused is proved by tests/tasks/test_child_process.py."""
    job = make_job(runtime.name)
    broken = Path(shutil.copytree(job.model, tmp_path / "broken"))
    (broken / "unet/diffusion_pytorch_model.safetensors").write_bytes(b"\0" * 64)
    assert "diffusion_pytorch_model" in runtime.refused(replace(job, model=str(broken)))
    assert not (Path(job.work) / "checkpoints").exists()
