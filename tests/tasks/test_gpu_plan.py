"""A plan for a GPU: peaks, advice, time, cost, and the check before a run."""

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from shortest_recipe import shortest_recipe

from configs.errors import Refused
from configs.settings.evaluate import PromptSet
from configs.settings.recipe import Plan, Recipe
from configs.settings.train import Train
from flows.show_plan import lines, show_plan
from runtimes.detect_hardware import NvidiaGpu
from runtimes.pipeline_folder.folder import Base
from runtimes.process.questions import GpuStepRequest, Moment, StepMemory, Unanswered
from runtimes.torch_models.gpu_specs import GIB, USABLE, Gpu, GpuSpec
from tasks.plan.across_hosts import notes_of_groups
from tasks.plan.choose_memory import choose_memory
from tasks.plan.gpu import GpuPlan, check_fits, plan_for
from tasks.plan.gpu_memory import Planner, with_settings
from tasks.plan.gpu_time import step_seconds
from tasks.plan.plan import cache_key
from tasks.plan.shipped_plans import digest_settings

Ask = Callable[..., dict[str, Any]]
HOST = 64 * GIB


#: A VAE and text encoders of 1/32 GiB each.
ENCODING = asdict(
    StepMemory(
        weights=GIB // 16,
        offloaded=3 * GIB // 64,
        pinned=GIB // 32,
        moments=[Moment({"temporaries": (0, GIB // 64)})],
        accumulating=[],
        captions=[Moment({"temporaries": (0, GIB // 256)})],
        flops_per_image=1.0,
    )
)


class Steps:
    """Answers requests as gpu_step_memory.py would for a model of 1 GiB, and records them.

    A picture needs 2 GiB of activations, or a quarter of it if they are recomputed. An adapter has
    no trained state to speak of. The model has eight equal blocks, of which two have buffers.
    """

    def __init__(self) -> None:
        self.asked: list[dict[str, Any]] = []

    def __call__(self, option: str, module: str, text: str) -> dict[str, Any]:
        assert (option, module) == ("-m", "runtimes.torch.gpu_step_memory")
        request = json.loads(text)
        self.asked.append(request)
        if request["encoding_dtype"] is not None:
            return ENCODING
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
        precision = None if sampling else train["lora"]["base_precision"]
        weights = {None: GIB, "int8": GIB // 4, "nf4": GIB // 8}[precision]
        found = StepMemory(
            parameters=trained // 4,
            weights=weights,
            streaming=[(weights * (n - 2 * (n > 0)) // 8, weights * n // 8) for n in range(9)],
            offloaded=GIB // 8 if sampling else 0,
            pinned=GIB if sampling else 0,
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
    monkeypatch.setattr("tasks.plan.gpu_memory.ask", steps)
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
    return recipe.model_copy(update={"train": with_settings(recipe.train, settings)})


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


def test_samples_during_training_need_the_vae_beside_the_state(
    plan: Callable[..., GpuPlan],
) -> None:
    assert plan(80).peaks.samples == 0
    found = plan(80, sample_every_n_steps=10, mixed_precision="no").peaks
    assert gib(found.samples) == 3 + 1 / 32 + 1 / 4  # one prompt


def test_autocast_keeps_casts_of_the_weights_while_samples_are_drawn(
    plan: Callable[..., GpuPlan],
) -> None:
    assert gib(plan(80, sample_every_n_steps=10).peaks.samples) == 3 + 1 / 2 + 1 / 32 + 1 / 4


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


def test_adamw_on_an_npu_needs_an_array_for_each_gradient(plan: Callable[..., GpuPlan]) -> None:
    """Without a fused kernel, the optimizer's step is the peak where activations are recomputed."""
    train = {"gradient_checkpointing": "blocks", "micro_batch_size": 1}
    assert gib(plan(80, **train).peaks.training) == 4.75
    found = plan(80, **train, device="npu").peaks
    assert gib(found.training) == 5.0 and found.parts["activations"] == 0
    assert gib(plan(80, **train, device="npu", optimizer="adafactor").peaks.training) < 5.0


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
    assert "train.optimizer" not in advised(changed(recipe, {"device": "npu"}))
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
    assert only.notes[-1] == "1.0 GiB of the host's memory"
    assert only.options.startswith("-o train.lora.base_precision=int8 -o evaluate.batch_size=3")
    (dora,) = plan(1.3 / USABLE, **lora, lora={"dora": True}).advice or [None]
    assert dora is None


@pytest.mark.parametrize("section", ["encode", "evaluate"])
def test_offloading_is_not_advised_for_an_npu(
    tiny_sd: Path, tmp_path: Path, steps: Steps, monkeypatch: pytest.MonkeyPatch, section: str
) -> None:
    """It has no effect there, so that text encoders of 4 GiB do not fit."""
    monkeypatch.setitem(ENCODING, "weights", 4 * GIB)
    lora = {"method": "lora", "gradient_checkpointing": "blocks", "micro_batch_size": 1}
    recipe = make_recipe(tiny_sd, tmp_path, **lora)

    def advised(recipe: Recipe) -> set[str]:
        card = Gpu("a card", int(3 / USABLE * GIB))
        found = plan_for(recipe, card, Base.open(tiny_sd)).advice
        return {name for advice in found for name in advice.settings}

    assert f"{section}.offload" in advised(recipe)
    assert not advised(with_settings(recipe, {f"{section}.device": "npu"}))


def test_blocks_are_streamed_only_if_no_8_bit_base_fits(plan: Callable[..., GpuPlan]) -> None:
    """A step of one picture needs 0.75 GiB beside weights of 0.25 or 0.125 GiB."""
    lora = {"method": "lora", "gradient_checkpointing": "blocks", "micro_batch_size": 1}

    def advised(gib: float) -> list[dict[str, Any]]:
        found = plan(gib / USABLE, **lora).advice
        return [{n: v for n, v in a.settings.items() if "evaluate" not in n} for a in found]

    eight_bit = {"train.lora.base_precision": "int8"}
    assert advised(1.01) == [eight_bit]
    streamed, resident = advised(0.95)
    assert streamed == eight_bit | {"train.stream_blocks": 4}, "the fewest"
    assert resident == {"train.lora.base_precision": "nf4"}
    assert advised(0.8) == [{"train.lora.base_precision": "nf4", "train.stream_blocks": 7}]


def test_no_blocks_are_streamed_for_pictures_drawn_during_training(
    tiny_sd: Path, tmp_path: Path, steps: Steps
) -> None:
    """They need 0.03 GiB more than a step beside an 8-bit base, which fits alone."""
    lora = {"method": "lora", "gradient_checkpointing": "blocks", "micro_batch_size": 1}
    recipe = make_recipe(tiny_sd, tmp_path, **lora, sample_every_n_steps=10)
    several = {"new": PromptSet(prompts=("a", "b", "c"))}
    recipe = with_settings(recipe, {"evaluate.prompts": several})
    found = plan_for(recipe, Gpu("a GPU", int(1.01 / USABLE * GIB)), Base.open(tiny_sd)).advice
    assert [{n: v for n, v in a.settings.items() if "train" in n} for a in found] == [
        {"train.lora.base_precision": "int8", "train.sample_every_n_steps": 0},
        {"train.lora.base_precision": "nf4"},
    ]


def test_streaming_counts_the_time_of_copies_and_the_hosts_memory(
    plan: Callable[..., GpuPlan],
) -> None:
    lora = {"method": "lora", "gradient_checkpointing": "blocks", "micro_batch_size": 1}
    streamed, resident = plan(0.95 / USABLE, **lora, sample_every_n_steps=0).advice
    assert 1.05 < streamed.time_ratio < resident.time_ratio == 2.0
    assert gib(streamed.host) == 1.0, "the evaluation's, after training"
    found = plan(80, **lora, lora={"base_precision": "int8"}, stream_blocks=8)
    assert gib(found.peaks.host) == 0.25
    drawing = {"lora": {"base_precision": "int8"}, "sample_every_n_steps": 10}
    both = plan(80, **lora, **drawing, stream_blocks=8)
    assert gib(both.peaks.host) == 0.25 + 1 / 32, "beside text encoders"
    slow = GpuSpec("slow", "", 80, 1e3, 1e3, pcie=1e-3)
    seconds = step_seconds(found.recipe.train, found.step, slow)
    assert seconds == pytest.approx(8 * 2 * GIB / 4 / (1e6 * 0.8)), "each picture, both passes"


def test_auto_memory_keeps_what_is_in_keys_on_another_gpu(
    tiny_sd: Path, tmp_path: Path, steps: Steps, monkeypatch: pytest.MonkeyPatch
) -> None:
    lora = {"method": "lora", "gradient_checkpointing": "blocks", "micro_batch_size": 1}
    asked = make_recipe(tiny_sd, tmp_path, **lora, memory="auto")

    def chosen(gib: float, recipe: Recipe = asked) -> Train:
        gpu = NvidiaGpu("NVIDIA GeForce RTX 4070", int(gib / USABLE * GIB))
        monkeypatch.setattr("tasks.plan.choose_memory.usable_gpus", lambda: [gpu])
        return choose_memory(recipe).train

    first = chosen(1.01)
    assert (first.memory, first.lora.base_precision, first.stream_blocks) == (None, "int8", 0)
    small = chosen(0.95)
    assert small.stream_blocks == 4 and small.key_settings() == first.key_settings()
    assert chosen(80) == first, "a larger GPU continues the same training"
    with pytest.raises(Refused, match=r"was begun with .*int8.* do not fit"):
        chosen(0.8)
    other = changed(asked, {"learning_rate": 1e-3})
    assert chosen(80, other).lora.base_precision is None
    monkeypatch.setattr("tasks.plan.choose_memory.usable_gpus", list)
    assert choose_memory(asked).train == changed(asked, {"memory": None}).train


def test_auto_streams_the_fewest_blocks_that_fit_with_all_else_as_it_is(
    tiny_sd: Path, tmp_path: Path, steps: Steps, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The plan of a card and a run on it agree; a base of fewer bits is not taken instead."""
    lora = {"method": "lora", "gradient_checkpointing": "blocks", "micro_batch_size": 1}
    recipe = make_recipe(
        tiny_sd, tmp_path, **lora, lora={"base_precision": "int8"}, stream_blocks="auto"
    )
    recipe = with_settings(recipe, {"evaluate.batch_size": 1, "evaluate.offload": True})
    as_it_is = recipe.train.model_dump(exclude={"stream_blocks"})

    def chosen(gib: float) -> Train:
        gpu = NvidiaGpu("NVIDIA GeForce RTX 4070", int(gib / USABLE * GIB))
        monkeypatch.setattr("tasks.plan.choose_memory.usable_gpus", lambda: [gpu])
        train = choose_memory(recipe).train
        planned = plan_for(recipe, Gpu(gpu.name, gpu.memory), Base.open(tiny_sd)).recipe
        assert train == planned.train
        assert train.model_dump(exclude={"stream_blocks"}) == as_it_is
        return train

    assert chosen(1.01).stream_blocks == 0
    assert chosen(0.95).stream_blocks == 4
    with pytest.raises(Refused, match=r"needs 0\.\d GiB, NVIDIA.* has 0\.5 GiB for tensors"):
        chosen(0.5)
    monkeypatch.setattr("tasks.plan.choose_memory.usable_gpus", list)
    assert choose_memory(recipe).train.stream_blocks == 0
    on_npu = changed(recipe, {"device": "npu"})
    with pytest.raises(Refused, match=r"^train\.stream_blocks: auto knows the memory of CUDA"):
        choose_memory(on_npu)


def test_auto_memory_trains_no_adapters_instead_of_all_weights(
    tiny_sd: Path, tmp_path: Path, steps: Steps, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu = NvidiaGpu("a GPU", int(3 / USABLE * GIB))
    monkeypatch.setattr("tasks.plan.choose_memory.usable_gpus", lambda: [gpu])
    with pytest.raises(Refused, match=r"it fits with .*train\.method=lora"):
        choose_memory(make_recipe(tiny_sd, tmp_path, memory="auto"))


def test_auto_memory_needs_no_package_that_is_not_here(
    tiny_sd: Path, tmp_path: Path, steps: Steps, monkeypatch: pytest.MonkeyPatch
) -> None:
    """8-bit moments are the fastest that fit beside recomputed activations."""
    gpu = NvidiaGpu("a GPU", int(3.9 / USABLE * GIB))
    monkeypatch.setattr("tasks.plan.choose_memory.usable_gpus", lambda: [gpu])
    asked = make_recipe(tiny_sd, tmp_path, micro_batch_size=1, ema_decay=0.9, memory="auto")

    def chosen(package: object) -> str:
        monkeypatch.setattr("tasks.plan.choose_memory.find_spec", lambda _: package)
        store = {"store": str(tmp_path / repr(package is None))}
        return choose_memory(asked.model_copy(update=store)).train.optimizer

    assert chosen(object()) == "adamw_8bit"
    with pytest.raises(Refused, match="adamw_8bit"):
        chosen(None)


def test_auto_memory_is_refused_where_another_machine_trains(tiny_sd: Path, tmp_path: Path) -> None:
    recipe = make_recipe(tiny_sd, tmp_path, memory="auto")
    placed = with_settings(recipe, {"place.train": "gpus"})
    with pytest.raises(Refused, match=r"place.train trains on another: set what `kiln plan"):
        choose_memory(placed)


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


def test_a_shard_group_divides_the_state_and_may_gather_all_weights_at_once(
    plan: Callable[..., GpuPlan],
) -> None:
    parts = plan(80, processes=4, fsdp="all", ema_decay=0.9).peaks.parts
    sizes = {name: gib(size) for name, size in parts.items()}
    assert sizes == {
        "weights": 1 / 4,
        "optimizer": 2 / 4,
        "ema": 1 / 4,
        "gradients": 1 / 4,
        "compute_weights": 1 / 2,  # in bfloat16
        "activations": 4,
        "temporaries": 1 / 2,
    }
    with pytest.raises(Refused, match=r"train.fsdp: 3 does not divide 4 processes"):
        plan(80, processes=4, fsdp=3)


#: A GiB of float32 gradients, and of the same weights in bfloat16.
GRADIENTS, WEIGHTS = GIB, GIB / 2


@pytest.mark.parametrize(
    ("train", "gradients", "weights"),
    [
        pytest.param({"hosts": 1, "processes": 8}, 0, 0, id="one-host"),
        # A ring of four hosts: each sends 2 x 3/4 of the gradients.
        pytest.param({"hosts": 4, "processes": 2}, 1.5 * GRADIENTS, 0, id="data"),
        # A group of each host: four devices send a quarter each.
        pytest.param({"hosts": 2, "processes": 4, "fsdp": 4}, GRADIENTS, 0, id="groups"),
        pytest.param({"hosts": 2, "processes": 4, "fsdp": 2}, GRADIENTS, 0, id="small-groups"),
        # One group of both: half of the weights comes from the other host in each of two passes of
        # two micro-batches, and half of the gradients goes there after each backward pass.
        pytest.param(
            {"hosts": 2, "processes": 2, "fsdp": "all", "micro_batch_size": 1},
            2 * GRADIENTS / 2,
            2 * 2 * WEIGHTS / 2,
            id="all",
        ),
        # Two groups of two hosts each: a host has half of the sums between the groups, too.
        pytest.param(
            {"hosts": 4, "processes": 2, "fsdp": 4},
            GRADIENTS / 2 + 2 * (1 / 2) * GRADIENTS / 2,
            2 * WEIGHTS / 2,
            id="groups-of-two-hosts",
        ),
        pytest.param({"hosts": 2, "method": "lora"}, 0, 0, id="lora"),  # of no parameters here
    ],
)
def test_what_crosses_hosts_is_the_ring_s_arithmetic(
    plan: Callable[..., GpuPlan], train: dict[str, Any], gradients: float, weights: float
) -> None:
    found = plan(80, **train).crossing
    assert (found.gradients, found.weights) == (gradients, weights)


def test_the_time_between_hosts_is_added_to_that_of_the_computation(
    tiny_sd: Path, tmp_path: Path, steps: Steps, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = make_recipe(tiny_sd, tmp_path, hosts=2, processes=2)
    recipe = recipe.model_copy(update={"plan": Plan(network_gbits=200.0, pictures=1000)})
    show_plan(recipe, None, "H100", search=False, as_json=True)
    facts = json.loads(capsys.readouterr().out)
    computing = 8 / 4 * 3e12 / (989.5e12 * 0.2)  # two pictures on each of four GPUs
    between = GIB * 8 / 200e9  # 2 x 1/2 of a GiB of gradients
    assert facts["crossing_seconds"] == pytest.approx(between)
    assert facts["step_seconds"] == pytest.approx(computing + between)
    assert facts["crossing_share"] == pytest.approx(between / (computing + between))
    assert facts["one_host_seconds"] == pytest.approx(2 * computing)
    assert facts["images_per_second"] == pytest.approx(8 / (computing + between))
    assert "nothing overlaps the network" in facts["assumption"]
    show_plan(recipe, None, "H100", search=False, as_json=False)
    printed = capsys.readouterr().out
    assert "network   each of 2 hosts sends per step: gradients 1.1 GB; 0.0429 s at 200" in printed
    assert "hosts     0.0303 s of computation and 0.0429 s between hosts (59%): 0.828" in printed


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
    assert "advice    -o train.micro_batch_size=3: 10.75 GiB, equal time" in said
    assert "10.0 GiB too much" in said
    assert "time      unknown without a listed peak: name another GPU, such as --gpu L4" in said
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


def test_more_offloaded_weights_than_the_host_can_pin_are_told(
    tiny_sd: Path, tmp_path: Path, steps: Steps, caplog: pytest.LogCaptureFixture
) -> None:
    """They are read from their files, which is slower."""
    recipe = make_recipe(tiny_sd, tmp_path)
    base = Base.open(tiny_sd)
    check_fits(recipe, base, 80 * GIB, 0, small=0)
    evaluate = recipe.evaluate.model_copy(update={"offload": True})
    recipe = recipe.model_copy(update={"evaluate": evaluate})
    check_fits(recipe, base, 80 * GIB, 2 * GIB, small=0)
    check_fits(recipe, base, 80 * GIB, None, small=0)
    assert "can pin" not in caplog.text
    check_fits(recipe, base, 80 * GIB, GIB, small=0)
    assert "1.0 GiB of offloaded weights are more than a host with 1.0 GiB can pin" in caplog.text
    shown = dict(lines(plan_for(recipe, Gpu("a GPU", 80 * GIB), base)))
    assert shown["host"].startswith("1.00 GiB")


def test_the_peak_of_encoding_is_planned(tiny_sd: Path, tmp_path: Path, steps: Steps) -> None:
    """A batch of pictures after a batch of captions, which is 32, beside the weights."""
    recipe = make_recipe(tiny_sd, tmp_path)
    planner = Planner(recipe, Base.open(tiny_sd), print)

    def peak(**settings: Any) -> tuple[float, float]:
        encode = recipe.encode.model_copy(update=settings)
        peaks = planner.peaks(recipe.train, recipe.evaluate, encode)
        assert peaks.largest >= peaks.encoding
        return gib(peaks.encoding), gib(peaks.host)

    assert peak(batch_size=4) == (1 / 16 + 32 / 256, 0)
    assert peak(batch_size=80) == (1 / 16 + 80 / 64, 0)
    assert peak(batch_size=4, offload=True) == (3 / 64 + 32 / 256, 1 / 32)
    assert peak(batch_size=4, text="token_ids") == (1 / 32 + 4 / 64, 0)


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

    monkeypatch.setattr("tasks.plan.gpu_memory.ask", fail)
    check_fits(make_recipe(tiny_sd, tmp_path), Base.open(tiny_sd), 20 * GIB, HOST, small=0)
    module = "runtimes.torch.gpu_step_memory"
    words = f"the memory of training is unknown: {module} ended with 1: no such operator"
    assert words in caplog.text


def test_a_mixture_with_prior_targets_is_planned_with_the_base_s_pass(
    tiny_sd: Path, tmp_path: Path, steps: Steps
) -> None:
    recipe = make_recipe(tiny_sd, tmp_path)
    pictures = {"source": {"kind": "folder", "path": "."}}
    sources = {"style": pictures, "old": {**pictures, "regularisation": "prior"}}
    settings = recipe.model_dump(mode="json", exclude={"source"})
    mixed = Recipe.model_validate({**settings, "sources": sources})
    for each, wanted in ((recipe, False), (mixed, True)):
        requests = Planner(each, Base.open(tiny_sd), print).requests()
        assert [request.has_prior for request in requests] == [wanted, False, False, False]


def test_a_plan_has_as_many_references_as_the_source_has_columns_or_as_are_stated(
    tiny_flux2: Path, tmp_path: Path, steps: Steps
) -> None:
    """Squares of the largest area in whole steps; other plans have the keys that they had."""
    plain = make_recipe(tiny_flux2, tmp_path)
    source = {"kind": "dataset", "path": ".", "reference_columns": ["before", "style"]}
    settings = plain.model_dump(mode="json")
    settings["encode"] |= {"reference_pixels": 300 * 300, "bucket_step": 64}
    edits = Recipe.model_validate({**settings, "source": source})
    lists = edits.model_copy(update={"plan": edits.plan.model_copy(update={"references": 3})})
    for each, count in ((plain, 0), (edits, 2), (lists, 3)):
        requests = Planner(each, Base.open(tiny_flux2), print).requests()
        assert {request.references for request in requests} == {((256, 256),) * count}
    assert digest_settings(plain) != digest_settings(edits)


def test_shard_groups_across_hosts_are_told_with_what_they_send() -> None:
    """Here half of the weights twice, and half of the gradients, for each of two micro-batches."""
    half = {"hosts": 2, "processes": 2, "global_batch_size": 8, "mixed_precision": "bf16"}
    both = {**half, "fsdp": "all", "micro_batch_size": 1}
    (found,) = notes_of_groups(Train(**both))
    assert found.what == (
        "train.fsdp: all gathers weights from host to host for each micro-batch, 2 times the bytes "
        "of groups within a host"
    )
    assert found.mend is not None and "-o train.fsdp=2" in found.mend
    (found,) = notes_of_groups(Train(**both, method="lora"))
    assert found.what.endswith("for each micro-batch")
    assert [*notes_of_groups(Train(**half, fsdp=2))] == []
