"""Invalid objectives are refused before work starts, in one line."""

import json
import re
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

import chips
import pytest
import torch
from reused_runs import published_by, run_of_digits

from artifacts.latent_shards import Latents, ShardRef
from configs.checks import enter
from configs.errors import Refused
from configs.load_recipe import load_recipe, load_trials
from flows.run import check_gate_rules, prepare
from flows.sweep import prepared
from runtimes.detect_hardware import NvidiaGpu, host_memory
from runtimes.pipeline_folder.folder import Base
from runtimes.process.questions import KINDS, Moment, StepMemory
from runtimes.registry import check_scheduler
from runtimes.torch_models.gpu_specs import GIB
from tasks.evaluate import inception
from tasks.preflight import Doors, _check_position_embeddings
from tasks.publish.register import register
from tasks.publish.stage import registry_of

PAINTS: dict[str, Any] = {"train.inpainting": True, "encode.masks": 2}


@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        ({"train.prediction_type": "epsilon"}, "set train.prediction_type to v_prediction"),
        ({"train.prediction_type": "flow"}, "flow needs a base with a FlowMatch scheduler"),
        (
            {"train.weighting_scheme": "cosmap"},
            "train.weighting_scheme: cosmap is for flow matching",
        ),
        (
            {
                "train.timesteps.bias_strategy": "range",
                "train.timesteps.bias_multiplier": 2.0,
                "train.timesteps.bias_end": 1001,
            },
            "train.timesteps.bias_begin and bias_end: 0 to 1001 is no range",
        ),
        ({"train.optimizer": "adamw_8bit", "train.device": "cpu"}, "needs bitsandbytes"),
        ({"runtime": "jax", "train.optimizer": "lion"}, "lion is not for runtime jax: set adamw"),
        ({"runtime": "jax", "train.compile": "blocks"}, "compile has no effect with runtime: jax"),
        ({"runtime": "jax", "train.lora.base_precision": "int8"}, "no effect with runtime: jax"),
        ({"runtime": "jax", "evaluate.offload": True}, "offload has no effect with runtime: jax"),
        ({"evaluate.offload": True, "evaluate.device": "hpu"}, "no effect with device: hpu"),
        ({"encode.text_precision": "nf4"}, "neither a T5 nor a language model"),
        ({"train.mixed_precision": "fp16"}, "fp16 requires runtime mindspore"),
        ({"train.cuda_graphs": True, "train.device": "cpu"}, "cuda_graphs needs a CUDA device"),
        ({"train.allow_tf32": True, "train.device": "cpu"}, "allow_tf32 needs a CUDA device"),
        ({"train.attention": "efficient", "train.device": "cpu"}, "attention needs a CUDA device"),
        (
            {"train.processes": 4, "train.fsdp": 3, "train.device": "cpu"},
            "train.fsdp 3 does not divide train.processes 4",
        ),
        (
            {
                "train.best_checkpoint": {"metric": "pick"},
                "train.sample_every_n_steps": 2,
                "train.checkpointing_steps": 2,
            },
            "train.best_checkpoint.metric: pick is not scored while training; it scores "
            "holdout_loss, clip_score, digit, style",
        ),
        (
            {"train.prediction_type": "sample", "publish.gate": ["holdout_loss < base"]},
            "publish.gate: 'holdout_loss < base' compares incomparable losses, since the scheduler",
        ),
        (
            {"evaluate.scheduler": "pndm"},
            "scheduler pndm cannot draw a model with zero terminal SNR: choose one of ddim,",
        ),
        (
            {"train.prediction_type": "sample", "evaluate.scheduler": "euler_ancestral"},
            "scheduler euler_ancestral cannot draw a model with prediction_type sample",
        ),
        (
            {**PAINTS, "publish.gate": ["holdout_loss < base"]},
            "publish.gate: 'holdout_loss < base' compares incomparable losses, since the inputs",
        ),
    ],
)
def test_an_invalid_objective_is_refused(
    small: dict[str, Any], overrides: dict[str, Any], line: str
) -> None:
    """The digits' base has v-prediction and zero terminal SNR."""
    with pytest.raises(ValueError, match=re.escape(line)) as error:
        prepare(load_recipe("digits", {**small, **overrides}))
    assert len(str(error.value).splitlines()) == 1


@pytest.mark.parametrize(
    "overrides",
    [
        {"publish.gate": ["holdout_loss < base"]},
        {"train.prediction_type": "sample"},
        {"train.prediction_type": "epsilon", "train.zero_terminal_snr": False},
        {"train.snr_gamma": None, "train.debiased_estimation_loss": True},
        PAINTS,
    ],
)
def test_a_valid_objective_is_accepted(small: dict[str, Any], overrides: dict[str, Any]) -> None:
    assert prepare(load_recipe("digits", {**small, **overrides})).base.folder.is_dir()


def test_weights_of_inception_need_their_file_and_torch_fidelity(
    small: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = tmp_path / "inception.pth"
    recipe = load_recipe("digits", {**small, "evaluate.inception": str(weights)})
    with pytest.raises(Refused, match=r"inception\.pth: no such file"):
        prepare(recipe)
    weights.write_bytes(b"weights")
    monkeypatch.setattr(inception, "ENVIRONMENT", "-absent")
    with pytest.raises(Refused, match="is not installed: run `make setup-fidelity`"):
        prepare(recipe)
    assert prepare(recipe, until="train").measuring.inception == weights


def test_a_base_without_a_computable_loss_is_refused(small: dict[str, Any], tmp_path: Path) -> None:
    base = load_recipe("digits", small).model.path
    copied = Path(shutil.copytree(base, tmp_path / "base"))
    path = copied / "scheduler/scheduler_config.json"
    config = {**json.loads(path.read_text()), "prediction_type": "epsilon"}
    path.write_text(json.dumps(config))
    changed = {"model.path": str(copied), "train.prediction_type": "v_prediction"}
    with pytest.raises(Refused, match="epsilon cannot go with zero terminal SNR"):
        prepare(load_recipe("digits", {**small, **changed}))


def test_another_spacing_of_the_sampler_s_timesteps_leaves_losses_comparable(
    small: dict[str, Any], tmp_path: Path
) -> None:
    """Of a base with zero terminal SNR, train.zero_terminal_snr changes the spacing alone."""
    base = load_recipe("digits", small).model.path
    copied = Path(shutil.copytree(base, tmp_path / "base"))
    path = copied / "scheduler/scheduler_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "timestep_spacing": "leading"}))
    changed = {"model.path": str(copied), "train.zero_terminal_snr": True}
    gate = {"publish.gate": ["holdout_loss < base"]}
    assert prepare(load_recipe("digits", {**small, **changed, **gate})).base.folder == copied


@pytest.mark.parametrize(
    ("file", "settings", "line"),
    [
        ("tokenizer/tokenizer_config.json", {"model_max_length": 20}, "takes 77 tokens"),
        ("unet/config.json", {"cross_attention_dim": 7}, "config and weights are of different"),
        ("vae/config.json", {"latent_channels": 3}, "config and weights are of different"),
    ],
)
def test_a_part_that_would_not_load_is_refused(
    small: dict[str, Any], tmp_path: Path, file: str, settings: dict[str, Any], line: str
) -> None:
    base = Path(shutil.copytree(load_recipe("digits", small).model.path, tmp_path / "base"))
    config = json.loads((base / file).read_text(encoding="utf-8"))
    (base / file).write_text(json.dumps(config | settings), encoding="utf-8")
    with pytest.raises(Refused, match=line) as error:
        prepare(load_recipe("digits", {**small, "model.path": str(base)}))
    assert len(str(error.value).splitlines()) == 1


def test_a_vae_without_weights_is_refused(small: dict[str, Any], tmp_path: Path) -> None:
    """Such as one of the hub whose configs alone were downloaded for a plan."""
    base = Path(load_recipe("digits", small).model.path)
    vae = tmp_path / "vae"
    vae.mkdir()
    shutil.copy(base / "vae/config.json", vae)
    with pytest.raises(Refused, match=r"model\.vae .*/vae: it has no \.safetensors weights"):
        prepare(load_recipe("digits", {**small, "model.vae": str(vae)}))


def test_a_base_whose_parts_lead_out_of_it_is_refused(
    small: dict[str, Any], tmp_path: Path
) -> None:
    """Such as one of the hub: publishing copies each part into the published folder."""
    base = Path(shutil.copytree(load_recipe("digits", small).model.path, tmp_path / "base"))
    index = json.loads((base / "model_index.json").read_text())
    index["../../.ssh"] = ["diffusers", "UNet2DConditionModel"]
    (base / "model_index.json").write_text(json.dumps(index))
    with pytest.raises(Refused, match=r"'\.\./\.\./\.ssh' is no name of a part"):
        prepare(load_recipe("digits", {**small, "model.path": str(base)}))


def test_a_licence_is_required_and_one_that_contradicts_the_bases_is_named(
    small: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    base = Path(shutil.copytree(load_recipe("digits", small).model.path, tmp_path / "base"))
    given = {**small, "model.path": str(base), "publish.require_license": True}
    (base / "README.md").write_text("# A base without a licence\n", encoding="utf-8")
    with pytest.raises(Refused, match=r"publish\.require_license: neither publish\.license nor"):
        prepare(load_recipe("digits", {**given, "publish.license": None}))
    (base / "README.md").write_text("---\nlicense: openrail++\n---\n", encoding="utf-8")
    prepare(load_recipe("digits", {**given, "publish.license": "openrail++"}))
    assert "publish.license" not in caplog.text
    prepare(load_recipe("digits", {**given, "publish.license": "mit"}))
    assert "publish.license: mit differs from the base's licence, openrail++" in caplog.text


@pytest.mark.parametrize("reason", ["", "  "])
def test_a_blank_reason_forces_no_publication(small: dict[str, Any], reason: str) -> None:
    with pytest.raises(Refused, match="force: give a reason"):
        prepare(load_recipe("digits", small), force=reason)


def test_a_damaged_champion_is_found_before_the_first_stage(tmp_path: Path) -> None:
    run = run_of_digits(tmp_path)
    register(run.recipe, run.base, run.store, published_by(run), {})
    (Path(registry_of(run.recipe).url("v1")) / "manifest.json").write_bytes(b"{}")
    prepare(run.recipe, until="evaluate")
    with pytest.raises(Refused, match="the champion v1 is damaged"):
        prepare(run.recipe)


def test_sides_beyond_the_position_embeddings_are_refused(
    small: dict[str, Any], tiny_sd3: Path, tmp_path: Path
) -> None:
    config = tmp_path / "config.json"
    own = json.loads((tiny_sd3 / "transformer/config.json").read_text())
    config.write_text(json.dumps({**own, "pos_embed_max_size": 4}))

    def check(largest: int, denoiser_config: str | None = None, **sides: int) -> None:
        recipe = load_recipe("digits", {f"evaluate.{name}": side for name, side in sides.items()})
        train = recipe.train.model_copy(update={"denoiser_config": denoiser_config})
        _check_position_embeddings(train, recipe.evaluate, Base.open(tiny_sd3), largest)

    check(96, height=96)
    refused: list[tuple[dict[str, Any], str]] = [
        ({"largest": 104}, r"encode\.resolution: sides of 104 pixels exceed the 96"),
        ({"largest": 96, "width": 104}, "evaluate.height and width: sides of 104"),
        ({"largest": 64, "denoiser_config": str(config)}, "sides of 64 pixels exceed the 32"),
        ({"largest": 32, "width": 64, "denoiser_config": str(config)}, "evaluate.* exceed the 32"),
    ]
    for wrong, words in refused:
        with pytest.raises(Refused, match=words):
            check(**wrong)
    given = {**small, "model.path": str(tiny_sd3), "train.snr_gamma": None}
    with pytest.raises(Refused, match=r"encode\.resolution: sides of 4096 pixels exceed the"):
        prepare(load_recipe("digits", {**given, "encode.resolution": 4096}))


def test_a_setting_without_effect_is_told_and_is_not_in_the_run(
    small: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    prepare(load_recipe("digits", small))
    assert "has no effect" not in caplog.text
    given = {**small, "train.lora.rank": 64, "encode.seed": 1}
    assert prepare(load_recipe("digits", given)).recipe == load_recipe("digits", small)
    assert "train.lora has no effect with train.method: full" in caplog.text
    assert "encode.seed has no effect with encode.crop: center and encode.masks: 0" in caplog.text


def test_a_rule_with_a_level_on_few_prompts_is_refused_before_it_is_judged(
    small: dict[str, Any],
) -> None:
    given = {
        **small,
        "evaluate.prompts.old.prompts": ["a handwritten zero in red ink on white paper", "a one"],
        "evaluate.bootstrap": 40,
        "publish.gate": ["clip_score/old >= base * 0.9 at 95%", "clip_score/new >= base at 95%"],
    }
    recipe = load_recipe("digits", given)
    prepare(recipe, until="evaluate")
    said = "clip_score/old .* its interval is ± 12.7 standard errors wide with 2 prompts"
    with pytest.raises(Refused, match=said):
        prepare(recipe)


def test_a_rule_that_few_prompts_decide_is_told_before_it_is_judged(
    small: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    digits = ("zero", "one", "two", "three", "four")
    old = [f"a handwritten {digit} in red ink on white paper" for digit in digits]
    given = {
        **small,
        "evaluate.prompts.old.prompts": old,
        "evaluate.bootstrap": 40,
        "publish.gate": ["clip_score/old >= base * 0.9 at 95%", "clip_score/new >= base at 95%"],
    }
    recipe = load_recipe("digits", given)
    prepare(recipe, until="evaluate")
    assert "would pass in" not in caplog.text
    prepare(recipe)
    assert caplog.text.count("'clip_score/old >= base * 0.9 at 95%': a model") == 1
    assert "clip_score/new" not in caplog.text  # it demands a gain, of which nothing is known


def test_a_warning_that_concerns_all_trials_of_a_sweep_is_told_once(
    small: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    values = {"train.lr_warmup_steps": [7, 8]}  # beside three learning rates
    given = {**small, "encode.seed": 1, "sweep.values": values}
    assert len(prepared(load_trials("digits", given), "a-run")) == 6
    assert caplog.text.count("encode.seed has no effect") == 1
    for steps in (7, 8):
        assert caplog.text.count(f"train.lr_warmup_steps: {steps} exceed") == 1
    prepare(load_recipe("digits", given))
    assert caplog.text.count("encode.seed has no effect") == 2


def test_a_warmup_that_exceeds_the_steps_is_told(
    small: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    prepare(load_recipe("digits", {**small, "train.lr_warmup_steps": 6}))  # of 6 steps
    assert "lr_warmup_steps" not in caplog.text
    prepare(load_recipe("digits", {**small, "train.lr_warmup_steps": 7}))
    assert "train.lr_warmup_steps: 7 exceed the 6 steps" in caplog.text


def test_more_processes_than_devices_are_refused(
    small: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")
    prepare(load_recipe("digits", {**small, "train.processes": 2}))
    with pytest.raises(Refused, match="need one CUDA device each, this machine has 2"):
        prepare(load_recipe("digits", {**small, "train.processes": 4}))


def test_shards_that_the_devices_cannot_share_are_refused(
    small: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    chips.importorskip("jax")
    monkeypatch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=2")
    jax = {**small, "runtime": "jax", "train.device": "cpu", "train.processes": 2}
    prepare(load_recipe("digits", {**jax, "train.fsdp": 4}), until="train")
    with pytest.raises(Refused, match=r"train\.fsdp 3 does not divide 4 devices"):
        prepare(load_recipe("digits", {**jax, "train.fsdp": 3}), until="train")


def test_shards_that_the_hosts_of_a_cluster_cannot_share_are_refused(small: dict[str, Any]) -> None:
    """Before the cluster is used, and without its devices."""
    hosts = {"train.hosts": 2, "train.processes": 2, "slurm": {}}
    recipe = load_recipe("digits", {**small, **hosts, "train.fsdp": 2, "train.device": "npu"})
    with pytest.raises(Refused, match=r"train\.fsdp: 2: device npu has no shard groups"):
        enter(Doors(recipe, ("train",)).machine())


@pytest.mark.parametrize("name", ["laion-jax", "sd2-v5p"])
def test_the_runtime_must_support_the_recipes_scheduler(name: str) -> None:
    recipe = load_recipe(name)
    base = {"_class_name": "PNDMScheduler"}  # of Stable Diffusion 2
    check_scheduler(recipe.runtime, base, recipe.evaluate.scheduler, 20)
    with pytest.raises(Refused, match="cannot draw with PNDMScheduler"):
        check_scheduler(recipe.runtime, base, None, 20)


#: Its shift to the terminal noise level divides by zero at one step.
QWEN_SCHEDULER = {"_class_name": "FlowMatchEulerDiscreteScheduler", "shift_terminal": 0.02}


@pytest.mark.parametrize(
    ("config", "steps", "words"),
    [
        ({"_class_name": "PNDMScheduler"}, 3, "PNDMScheduler takes 4 to 1000 steps, not 3"),
        ({"_class_name": "PNDMScheduler"}, 4, None),
        ({"_class_name": "PNDMScheduler", "skip_prk_steps": True}, 1, None),
        ({"_class_name": "DDIMScheduler", "num_train_timesteps": 50}, 51, "takes 1 to 50 steps"),
        ({"_class_name": "EulerDiscreteScheduler"}, 1000, None),
        ({"_class_name": "FlowMatchEulerDiscreteScheduler"}, 2000, None),
        (QWEN_SCHEDULER, 1, "takes 2 or more steps, not 1"),
        (QWEN_SCHEDULER, 2, None),
    ],
)
def test_a_scheduler_takes_so_many_steps(
    config: dict[str, Any], steps: int, words: str | None
) -> None:
    if words is None:
        check_scheduler("torch", config, None, steps)
        return
    with pytest.raises(Refused, match=f"evaluate.num_inference_steps: .*{words}"):
        check_scheduler("torch", config, None, steps)


def test_rules_without_held_out_pictures_are_refused_before_training(small: dict[str, Any]) -> None:
    def latents(**groups: int) -> Latents:
        return Latents(
            {}, [ShardRef("", 0, "", {f"{split}/8x8": n for split, n in groups.items()})]
        )

    recipe = load_recipe("digits", {**small, "publish.gate": ["cmmd < base"]})
    check_gate_rules(recipe, latents(train=9, holdout=2))
    with pytest.raises(Refused, match=r"cmmd is not measured \(encode\.holdout .* raise it"):
        check_gate_rules(recipe, latents(train=9))
    with pytest.raises(Refused, match=r"cmmd is not measured \(encode\.holdout .* selected 1 of"):
        check_gate_rules(recipe, latents(train=9, holdout=1))
    check_gate_rules(
        load_recipe("digits", {**small, "publish.gate": ["holdout_loss < base"]}),
        latents(train=9, holdout=1),
    )
    check_gate_rules(
        load_recipe("digits", {**small, "publish.gate": ["digit/new > 0"]}), latents(train=9)
    )


def test_few_held_out_pictures_are_told_before_training(
    small: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    rule = "holdout_loss < base at 95%"
    more = {"evaluate.bootstrap": 40, "evaluate.holdout_samples": 256}
    recipe = load_recipe("digits", {**small, **more, "publish.gate": [rule]})
    for held_out, told in ((16, 0), (8, 1)):
        shard = ShardRef("", 0, "", {"holdout/8x8": held_out})
        check_gate_rules(recipe, Latents({}, [shard]))
        assert caplog.text.count("of its runs, with") == told
    assert "of its runs, with 8 held-out pictures" in caplog.text


def test_an_error_of_a_source_names_it(small: dict[str, Any], tmp_path: Path) -> None:
    settings = {name: value for name, value in small.items() if not name.startswith("source.")}
    missing = {"source": {"kind": "folder", "path": str(tmp_path / "none")}}
    sources = {"subject": missing, "chalk": {"source": {"kind": "digits", "count": 20}}}
    with pytest.raises(Refused, match=r"^sources\.subject\.source\.path: "):
        prepare(load_recipe("digits", {**settings, "sources": sources}))


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Models that were planned; each step needs 1 GiB."""
    models: list[str] = []

    def ask(*words: str) -> dict[str, Any]:
        models.append(json.loads(words[-1])["model"])
        moments = [Moment({**dict.fromkeys(KINDS, (0, 0)), "activations": (GIB, 0)})]
        several: Any = dict.fromkeys(("moments", "accumulating", "captions"), moments)
        step = StepMemory(weights=1, flops_per_image=1.0, **several)
        return asdict(step)

    monkeypatch.setattr("tasks.plan.gpu_memory.ask", ask)
    return models


def test_training_that_cannot_fit_the_gpu_is_refused(
    small: dict[str, Any], planned: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The largest GPU of the machine counts."""
    found = [NvidiaGpu("a GPU", size * 2**20) for size in (50, 100)]
    monkeypatch.setattr("tasks.preflight.usable_gpus", lambda: found)
    with pytest.raises(Refused, match=r"digits needs 1\.0 GiB, this GPU has 0\.1 GiB for"):
        prepare(load_recipe("digits", small))
    assert planned
    prepare(load_recipe("digits", {**small, "train.device": "cpu"}))
    prepare(load_recipe("digits", small), until="encode")


def test_an_evaluation_elsewhere_needs_no_memory_of_this_host(
    small: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    hosts: list[int | None] = []
    monkeypatch.setattr("tasks.preflight.usable_gpus", lambda: [NvidiaGpu("a GPU", GIB)])
    monkeypatch.setattr("tasks.preflight.check_fits", lambda *given: hosts.append(given[-1]))
    recipe = load_recipe("digits", small)
    prepare(recipe)
    prepare(recipe, until="train")
    assert hosts == [host_memory(), None]


def test_a_model_that_is_small_beside_the_gpu_is_not_planned(
    small: dict[str, Any], planned: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tasks.preflight.usable_gpus", lambda: [NvidiaGpu("a GPU", 24 * GIB)])
    prepare(load_recipe("digits", small))
    assert planned == []
