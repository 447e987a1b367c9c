"""A plan for a GPU: peaks, advice, time, cost, and the check before a run."""

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from shortest_recipe import shortest_recipe

from configs.errors import Refused
from configs.settings.recipe import Recipe
from flows.show_plan import lines, show_plan
from runtimes.pipeline_folder.folder import Base
from runtimes.process.questions import GpuStepRequest, Moment, StepMemory, Unanswered
from runtimes.torch_models.gpu_specs import GIB, Gpu
from tasks.plan.gpu import USABLE, GpuPlan, check_fits, plan_for, with_train
from tasks.plan.plan import cache_key

Ask = Callable[..., dict[str, Any]]
HOST = 64 * GIB


class Steps:
    """Answers requests as gpu_step_memory.py would for a model of 1 GiB, and records them.

    A picture needs 2 GiB of activations, or a quarter of it if they are recomputed. An adapter has
    no trained state to speak of.
    """

    def __init__(self) -> None:
        self.asked: list[dict[str, Any]] = []

    def __call__(self, option: str, module: str, text: str) -> dict[str, Any]:
        assert (option, module) == ("-m", "runtimes.torch.gpu_step_memory")
        request = json.loads(text)
        self.asked.append(request)
        train, sampling = request["train"], request["sampling_dtype"] is not None
        lora = train.get("method") == "lora" or sampling
        recomputed = train.get("gradient_checkpointing", "none") != "none"
        trained = 0 if lora else GIB
        moment = {
            "gradients": (0, 0),
            "compute_weights": (0, 0),
            "activations": (0, 0 if sampling else GIB // 2 if recomputed else 2 * GIB),
            "temporaries": (0, GIB // 4),
        }
        found = StepMemory(
            parameters=trained // 4,
            weights=GIB // 4 if "int8" in json.dumps(train) else GIB,
            offloaded=GIB // 8 if sampling else 0,
            encoders=GIB,
            optimizer=2 * trained,
            optimizer_8bit=trained // 2,
            ema=trained,
            largest=trained // 100,
            moments=[Moment(moment)],
            accumulating=[Moment({**moment, "gradients": (trained, 0)})],
            flops_per_image=2e12 if lora else 3e12,
            recomputed_flops_per_image=1e12 if recomputed else 0.0,
            seconds=1.0,
        )
        return dict(json.loads(json.dumps(asdict(found))))


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> Steps:
    steps = Steps()
    monkeypatch.setattr("tasks.plan.gpu.ask", steps)
    return steps


@pytest.fixture
def plan(tiny_sd: Path, tmp_path: Path, steps: Steps) -> Callable[..., GpuPlan]:
    """`plan(gib, **train)` plans a recipe of 8 pictures for a GPU."""

    def make(gib: float, **train: Any) -> GpuPlan:
        recipe = make_recipe(tiny_sd, tmp_path, **train)
        return plan_for(recipe, Gpu("a GPU", int(gib * GIB)), Base.open(tiny_sd))

    return make


def make_recipe(model: Path, folder: Path, **train: Any) -> Recipe:
    return shortest_recipe(
        store=str(folder / "store"),
        model={"path": str(model)},
        encode={"resolution": 32},
        train={"steps": 3600, "global_batch_size": 8, "mixed_precision": "bf16", **train},
        plan={"pictures": 1000, "chip_hour_price": 2.0},
    )


def gib(size: int) -> float:
    return size / GIB


def changed(recipe: Recipe, settings: dict[str, Any]) -> Recipe:
    """The recipe with other train settings."""
    return recipe.model_copy(update={"train": with_train(recipe.train, settings)})


def test_the_peak_is_the_sum_of_its_parts(plan: Callable[..., GpuPlan]) -> None:
    found = plan(80)
    parts = {name: gib(size) for name, size in found.peaks.parts.items() if size}
    assert parts == {"weights": 1, "optimizer": 2, "activations": 16, "temporaries": 2}
    assert gib(found.peaks.largest) == 21 and found.fits
    assert gib(found.peaks.sampling) == 1 + 4 / 4  # evaluate.batch_size 4


def test_the_table_has_the_micro_batch_that_is_used(plan: Callable[..., GpuPlan]) -> None:
    shown = dict(lines(plan(80, micro_batch_size=5, processes=2)))
    assert shown["batch"] == "8 in micro-batches of 4"


def test_sampling_is_planned_at_the_size_that_is_drawn(
    plan: Callable[..., GpuPlan], tiny_sd: Path, tmp_path: Path, steps: Steps
) -> None:
    def drawn() -> list[Any]:
        sampling = [one for one in steps.asked if one["sampling_dtype"] is not None]
        return [one["drawn_size"] for one in sampling if one["resolution"] == 32]

    plan(80, sample_every_n_steps=10)
    assert {tuple(size) for size in drawn()} == {(32, 32)}, "the model's own size"
    recipe = make_recipe(tiny_sd, tmp_path)
    larger = recipe.evaluate.model_copy(update={"height": 256})
    plan_for(recipe.model_copy(update={"evaluate": larger}), Gpu("a GPU", GIB), Base.open(tiny_sd))
    assert tuple(drawn()[-1]) == (256, 32)


def test_micro_batches_keep_gradients(plan: Callable[..., GpuPlan]) -> None:
    parts = plan(80, micro_batch_size=2, ema_decay=0.9).peaks.parts
    assert gib(parts["gradients"]) == gib(parts["ema"]) == 1
    assert gib(parts["activations"]) == 4
    assert gib(plan(80, micro_batch_size=2, optimizer="adamw_8bit").peaks.parts["optimizer"]) == 0.5


def test_samples_during_training_need_the_encoders_beside_the_state(
    plan: Callable[..., GpuPlan],
) -> None:
    assert plan(80).peaks.samples == 0
    found = plan(80, sample_every_n_steps=10, mixed_precision="no").peaks
    assert gib(found.samples) == 3 + 1 + 1 / 4  # one prompt


def test_autocast_keeps_casts_of_the_weights_while_samples_are_drawn(
    plan: Callable[..., GpuPlan],
) -> None:
    assert gib(plan(80, sample_every_n_steps=10).peaks.samples) == 3 + 1 / 2 + 1 + 1 / 4


def test_a_checkpoint_has_four_bytes_for_each_value(plan: Callable[..., GpuPlan]) -> None:
    """A saved State has float32 arrays, of 8-bit moments too."""
    assert gib(plan(80, optimizer="adamw_8bit", ema_decay=0.9).checkpoint_bytes) == 1 + 2 + 1


def test_a_search_finds_the_largest_micro_batch_beyond_the_recipes(
    tiny_sd: Path, tmp_path: Path, steps: Steps
) -> None:
    """The state has 3 GiB, gradients of several micro-batches 1 GiB, a picture 2.25 GiB."""

    def largest(memory: float, *, search: bool, **train: Any) -> int | None:
        gpu = Gpu("a GPU", int(memory * GIB / USABLE) + 1)
        recipe = make_recipe(tiny_sd, tmp_path, **train)
        return plan_for(recipe, gpu, Base.open(tiny_sd), search=search).largest_micro_batch

    assert [largest(3 + 10 * 2.25, search=search) for search in (False, True)] == [8, 10]
    assert largest(4 + 10 * 2.25, search=True, processes=2) == 10
    assert largest(4 + 3 * 2.25, search=True) == 3


def test_selective_recomputation_is_planned_only_where_blocks_are_not_compiled(
    plan: Callable[..., GpuPlan],
) -> None:
    peaks = {
        what: plan(80, gradient_checkpointing="selective", compile=what).peaks.parts
        for what in ("auto", "none")
    }
    assert peaks["auto"]["activations"] > peaks["none"]["activations"]


def test_advice_fits_and_costs_least_first(plan: Callable[..., GpuPlan]) -> None:
    """The state has 5 GiB, a picture 2.25 GiB or, recomputed, 0.75 GiB."""
    found = plan(12 / USABLE, ema_decay=0.9)
    assert not found.fits and found.largest_micro_batch == 3
    advised = [(a.settings, gib(a.peak), round(a.flops_ratio, 2)) for a in found.advice]
    eight_bit = {"train.optimizer": "adamw_8bit", "train.ema_decay": None}
    assert advised == [
        ({"train.micro_batch_size": 3}, 11.75, 1.0),
        ({**eight_bit, "train.micro_batch_size": 4}, 11.5, 1.0),
        ({"train.gradient_checkpointing": "blocks"}, 10.0, 1.33),
    ]


def test_adapters_are_advised_only_if_nothing_else_fits(plan: Callable[..., GpuPlan]) -> None:
    found = plan(3 / USABLE, micro_batch_size=1).advice
    assert [(advice.settings, gib(advice.peak)) for advice in found] == [
        ({"train.lora.base_precision": "int8", "train.method": "lora"}, 2.5),
        ({"train.gradient_checkpointing": "blocks", "train.method": "lora"}, 2.0),
    ]
    assert any("adapters" in note for note in found[0].notes)
    hopeless = plan(0.5 / USABLE)
    assert hopeless.advice == ()
    assert hopeless.refusal().endswith(
        "no settings known here make it fit; lower encode.resolution"
    )


def test_no_advice_is_a_setting_that_a_run_refuses(
    plan: Callable[..., GpuPlan], tiny_sd: Path, tmp_path: Path, steps: Steps
) -> None:
    def advised(recipe: Recipe) -> set[str]:
        found = plan_for(recipe, Gpu("a GPU", int(4.2 * GIB / USABLE)), Base.open(tiny_sd)).advice
        return {name for advice in found for name in advice.settings}

    recipe = make_recipe(tiny_sd, tmp_path, micro_batch_size=1, ema_decay=0.9)
    assert "train.optimizer" in advised(recipe)
    assert "train.optimizer" not in advised(recipe.model_copy(update={"runtime": "xla"}))
    assert "train.optimizer" not in advised(changed(recipe, {"fsdp": "all"}))
    assert "train.method" in {n for a in plan(3 / USABLE).advice for n in a.settings}
    # Adapters cannot add an inpainting UNet's inputs, unless the base has them.
    masked = changed(recipe, {"inpainting": True})
    assert plan_for(masked, Gpu("a GPU", 2 * GIB), Base.open(tiny_sd)).advice == ()


def test_a_smaller_sampling_batch_is_advised_too(plan: Callable[..., GpuPlan]) -> None:
    lora = {"method": "lora", "gradient_checkpointing": "blocks", "micro_batch_size": 1}
    found = plan(1.8 / USABLE, **lora)
    assert not found.fits
    assert found.advice[0].settings == {"evaluate.batch_size": 3}


def test_an_8_bit_base_and_offloading_are_advised(plan: Callable[..., GpuPlan]) -> None:
    """Offloading is, only if no sampling batch fits without."""
    lora = {"method": "lora", "gradient_checkpointing": "blocks", "micro_batch_size": 1}
    (only,) = plan(1.1 / USABLE, **lora).advice
    assert only.settings == {
        "train.lora.base_precision": "int8",
        "evaluate.batch_size": 3,
        "evaluate.offload": True,
    }
    assert gib(only.peak) == 1.0
    assert only.notes[-1] == "1.0 GiB of the host's memory for the evaluation"
    assert only.options.startswith("-o train.lora.base_precision=int8 -o evaluate.batch_size=3")
    (dora,) = plan(1.3 / USABLE, **lora, lora={"dora": True}).advice or [None]
    assert dora is None


def test_a_plan_is_that_of_a_linked_folders_config(tmp_path: Path) -> None:
    shared, model = tmp_path / "shared", tmp_path / "model"
    shared.mkdir()
    model.mkdir()
    (model / "vae").symlink_to(shared)
    keys = set()
    for config in ("{}", '{"layers": 2}'):
        (shared / "config.json").write_text(config)
        keys.add(cache_key(1, GpuStepRequest(str(model), {}, 64), {}))
    assert len(keys) == 2


def test_plans_are_cached_and_variants_share_them(
    plan: Callable[..., GpuPlan], steps: Steps
) -> None:
    plan(80)
    asked = len(steps.asked)
    plan(80, ema_decay=0.9, optimizer="adamw_8bit", micro_batch_size=2, learning_rate=1e-3)
    assert len(steps.asked) == asked
    plan(80, train_text_encoder=True)
    assert len(steps.asked) == asked + 1


def test_several_gpus_share_the_batch_and_not_the_weights(plan: Callable[..., GpuPlan]) -> None:
    parts = plan(80, processes=4, device="cuda").peaks.parts
    assert gib(parts["activations"]) == 4 and gib(parts["weights"]) == gib(parts["gradients"]) == 1
    with pytest.raises(Refused, match=r"train.fsdp: .* set 1"):
        plan(80, processes=4, fsdp="all")


def test_the_command_prints_peak_advice_time_and_cost(
    tiny_sd: Path, tmp_path: Path, steps: Steps, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = make_recipe(tiny_sd, tmp_path)
    show_plan(recipe, None, "H100", search=False, as_json=True)
    printed = capsys.readouterr()
    assert "computing the memory of a training step: seconds to a minute\n" in printed.err
    show_plan(recipe, None, "H100", search=False, as_json=True)
    assert capsys.readouterr().err == "", "the store has the steps"
    facts = json.loads(printed.out)
    assert facts["fits"] and facts["peak_gib"] == 21 and facts["advice"] == []
    seconds = 8 * 3e12 / (989.5e12 * 0.2)
    assert facts["step_seconds"] == pytest.approx(seconds)
    assert facts["cost"] == pytest.approx(2.0 * seconds)  # 3,600 steps are an hour of seconds
    with pytest.raises(Refused, match=r"needs 21.0 GiB, 12 GB has 11.0 GiB .* fits with -o"):
        show_plan(recipe, None, "12GB", search=False, as_json=True)
    facts = json.loads(capsys.readouterr().out)
    assert not facts["fits"] and facts["step_seconds"] is None
    assert facts["advice"][0]["settings"] == {"train.micro_batch_size": 3}
    with pytest.raises(Refused):
        show_plan(recipe, None, "12GB", search=False, as_json=False)
    said = capsys.readouterr().out
    assert "advice    -o train.micro_batch_size=3: 10.75 GiB, equal FLOPs" in said
    assert "10.0 GiB too much" in said
    assert "time      unknown for a size of memory: name a GPU, such as --gpu L4" in said
    with pytest.raises(Refused):
        show_plan(recipe, "v5p-8", "12GB", search=False, as_json=False)


@pytest.mark.extended
@pytest.mark.slow
def test_the_step_itself_is_planned_in_a_process_of_its_own(
    tiny_sd: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    show_plan(make_recipe(tiny_sd, tmp_path), None, "L4", search=False, as_json=True)
    facts = json.loads(capsys.readouterr().out)
    assert facts["fits"] and 0 < facts["peak_gib"] < 1 and facts["flops_per_image"] > 0


def test_a_run_that_cannot_fit_is_refused(tiny_sd: Path, tmp_path: Path, steps: Steps) -> None:
    recipe = make_recipe(tiny_sd, tmp_path, compile="none")
    with pytest.raises(Refused, match=r"needs 21.0 GiB, this GPU has .* it fits with -o train"):
        check_fits(recipe, Base.open(tiny_sd), 20 * GIB, HOST, small=0)
    check_fits(recipe, Base.open(tiny_sd), 22 * GIB, HOST, small=0)


def test_offloaded_weights_must_fit_the_hosts_memory(
    tiny_sd: Path, tmp_path: Path, steps: Steps
) -> None:
    recipe = make_recipe(tiny_sd, tmp_path)
    check_fits(recipe, Base.open(tiny_sd), 80 * GIB, 0, small=0)
    evaluate = recipe.evaluate.model_copy(update={"offload": True})
    recipe = recipe.model_copy(update={"evaluate": evaluate})
    check_fits(recipe, Base.open(tiny_sd), 80 * GIB, GIB, small=0)
    with pytest.raises(Refused, match=r"keeps 1.0 GiB .* which has 0.9 GiB"):
        check_fits(recipe, Base.open(tiny_sd), 80 * GIB, 9 * GIB // 10, small=0)
    check_fits(recipe, Base.open(tiny_sd), 80 * GIB, None, small=0)
    shown = dict(lines(plan_for(recipe, Gpu("a GPU", 80 * GIB), Base.open(tiny_sd))))
    assert shown["host"].startswith("1.00 GiB")


def test_a_run_that_may_fit_if_compiled_starts_with_a_warning(
    tiny_sd: Path, tmp_path: Path, steps: Steps, caplog: pytest.LogCaptureFixture
) -> None:
    recipe = make_recipe(tiny_sd, tmp_path, compile="blocks")
    check_fits(recipe, Base.open(tiny_sd), 13 * GIB, HOST, small=0)
    assert "may run out of memory" in caplog.text
    with pytest.raises(Refused):
        check_fits(recipe, Base.open(tiny_sd), 10 * GIB, HOST, small=0)


def test_a_small_model_is_not_planned(tiny_sd: Path, tmp_path: Path, steps: Steps) -> None:
    check_fits(make_recipe(tiny_sd, tmp_path), Base.open(tiny_sd), 20 * GIB, HOST)
    assert steps.asked == []


def test_a_run_starts_if_it_cannot_be_planned(
    tiny_sd: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: Any) -> dict[str, Any]:
        raise Unanswered("runtimes.torch.gpu_step_memory", 1, "no such operator")

    monkeypatch.setattr("tasks.plan.gpu.ask", fail)
    check_fits(make_recipe(tiny_sd, tmp_path), Base.open(tiny_sd), 20 * GIB, HOST, small=0)
    module = "runtimes.torch.gpu_step_memory"
    words = f"the memory of training is unknown: {module} ended with 1: no such operator"
    assert words in caplog.text
