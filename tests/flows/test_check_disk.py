"""A run's disk is estimated before it starts, and a local disk that cannot hold it refuses it."""

import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from toy_recipes import base_of

from artifacts.store import Store
from configs.errors import Refused
from configs.load_recipe import load_recipe
from configs.settings.recipe import Recipe
from runtimes.detect_hardware import NvidiaGpu
from runtimes.torch_models.gpu_specs import GIB
from tasks.plan import disk as module
from tasks.plan.disk import check_disk
from tasks.plan.plan import estimate_disk
from tasks.progress import bytes_in_words

Here = Callable[..., str]  # of conftest.py
STAGES = load_recipe("digits").stages
#: Estimates are at most so many times the bytes of a run, and at least these.
LARGEST, SMALLEST = 2.2, 0.9


@pytest.mark.parametrize(
    ("size", "words"),
    [
        (999, "999 B"),
        (1_500, "1.5 kB"),
        (999_960, "1 MB"),
        (139e6, "139 MB"),
        (999_600_000, "1 GB"),
        (3.14e9, "3.1 GB"),
        (2.5e12, "2.5 TB"),
    ],
)
def test_a_number_of_bytes_never_rounds_to_a_thousand_of_its_unit(size: float, words: str) -> None:
    assert bytes_in_words(size) == words


@pytest.fixture
def free(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int], None]]:
    """`free(n)`: every disk has n bytes free."""

    def use(size: int) -> None:
        found = SimpleNamespace(free=size, total=size, used=0)
        monkeypatch.setattr(module, "shutil", SimpleNamespace(disk_usage=lambda path: found))

    yield use


def ask(recipe: Recipe, rows: int = 1000, shards: tuple[str, ...] | None = None) -> None:
    check_disk(recipe, Store(recipe.store), base_of(recipe), rows, STAGES, shards)


@pytest.mark.slow
def test_the_estimate_of_a_stage_is_near_its_bytes(
    published: Path, smallest: dict[str, Any]
) -> None:
    """Captions that pictures share and the checkpoint in writing make it larger."""
    store = published / "store"
    (manifest,) = (store / "download").glob("*/manifest.json")
    recipe = load_recipe("digits", smallest)
    rows = next(
        int(line.split(":")[1].strip(" ,\n"))
        for line in manifest.read_text(encoding="utf-8").splitlines()
        if line.strip().startswith('"rows"')
    )
    estimate = estimate_disk(recipe, base_of(recipe), rows, STAGES)
    for stage in STAGES:
        places = [store / stage, *([store / "registry"] if stage == "publish" else [])]
        stored = sum(p.stat().st_size for place in places for p in place.rglob("*") if p.is_file())
        ratio = estimate[stage] / stored
        assert SMALLEST < ratio < LARGEST, f"{stage}: {estimate[stage]} for {stored} bytes"


def test_a_checkpoint_of_8_bit_moments_takes_as_much_as_of_32_bits() -> None:
    """It holds each value in four bytes."""
    sizes = {}
    for optimizer in ("adamw", "adamw_8bit"):
        recipe = load_recipe("digits", {"train.optimizer": optimizer, "train.device": "cuda"})
        sizes[optimizer] = sum(estimate_disk(recipe, base_of(recipe), 1000, ["train"]).values())
    assert sizes["adamw"] < sizes["adamw_8bit"] < 1.01 * sizes["adamw"]


def test_a_disk_that_cannot_hold_the_run_refuses_it(
    tmp_path: Path, free: Callable[[int], None], caplog: pytest.LogCaptureFixture
) -> None:
    recipe = load_recipe("digits", {"store": str(tmp_path / "not/yet")})
    free(10**12)
    with caplog.at_level(logging.INFO, logger="kiln"):
        ask(recipe)
    assert "estimate: 1,000 rows, at most 198 MB of disk" in caplog.messages[0]
    assert "1 TB are free" in caplog.messages[0]
    free(10**7)
    with pytest.raises(Refused) as refused:
        ask(recipe)
    said = str(refused.value)
    assert len(said.splitlines()) == 1 and "has 10 MB free" in said
    for word in (str(tmp_path), "train 139 MB", "kiln gc", "plan.disk_gb", "set `store`"):
        assert word in said


def test_the_recipe_corrects_a_wrong_estimate(tmp_path: Path, free: Callable[[int], None]) -> None:
    free(10**7)
    small = {"store": str(tmp_path)}
    for size in (0, 0.009):
        ask(load_recipe("digits", {**small, "plan.disk_gb": size}))
    with pytest.raises(Refused, match="needs about 20 MB"):
        ask(load_recipe("digits", {**small, "plan.disk_gb": 0.02}))


def add_shards(recipe: Recipe, stage: str, *keys: str) -> None:
    folder = Path(Store(recipe.store).shards_path(stage))
    folder.mkdir(parents=True, exist_ok=True)
    for key in keys:
        (folder / f"{key}.json").touch()


def test_stored_shards_need_no_space_again(tmp_path: Path, free: Callable[[int], None]) -> None:
    """A stored shard of pictures does not stand for one of latents."""
    recipe = load_recipe("digits", {"store": str(tmp_path)})
    estimate = estimate_disk(recipe, base_of(recipe), 10**6, STAGES)
    pictures, latents = estimate["download"], estimate["encode"]
    needed, keys = sum(estimate.values()), ("one", "two")
    steps: list[tuple[str, str, int]] = [
        ("download", "one", pictures),
        ("encode", "one", latents),
        ("download", "two", pictures),
        ("encode", "two", latents),
    ]
    for stage, key, size in steps:
        free(needed - 2)
        with pytest.raises(Refused):
            ask(recipe, 10**6, keys)
        add_shards(recipe, stage, key)
        needed -= size // 2
        free(needed + 2)
        ask(recipe, 10**6, keys)


@pytest.mark.parametrize("disk_gb", [None, 500])
def test_a_run_whose_stages_are_stored_is_not_refused(
    disk_gb: int | None, tmp_path: Path, free: Callable[[int], None]
) -> None:
    recipe = load_recipe("digits", {"store": str(tmp_path), "plan.disk_gb": disk_gb})
    add_shards(recipe, "download", "one")
    add_shards(recipe, "encode", "one")
    free(0)
    for stage in ("train", "evaluate", "publish"):
        with pytest.raises(Refused):
            ask(recipe, shards=("one",))
        (tmp_path / stage / ("0" * 64)).mkdir(parents=True)  # begun, or finished
    ask(recipe, shards=("one",))
    with pytest.raises(Refused):
        ask(recipe, shards=("one", "new"))


def test_a_sent_stage_counts_alone(tmp_path: Path, free: Callable[[int], None]) -> None:
    recipe = load_recipe("digits", {"store": str(tmp_path)})
    free(10**6)
    check_disk(recipe, Store(recipe.store), base_of(recipe), 60, ["download"], ["one"])
    with pytest.raises(Refused, match=r"\(train 139 MB\)"):
        check_disk(recipe, Store(recipe.store), base_of(recipe), 60, ["train"], ["one"])


def test_a_bucket_has_no_limit_that_is_known(free: Callable[[int], None]) -> None:
    free(0)
    recipe = load_recipe("digits", {"store": "memory://bucket/here"})
    ask(recipe, 10**9)


def test_fewer_stages_need_less(tmp_path: Path) -> None:
    recipe = load_recipe("digits", {"store": str(tmp_path)})
    sizes = [
        sum(estimate_disk(recipe, base_of(recipe), 100, STAGES[:n]).values()) for n in range(1, 6)
    ]
    assert sizes == sorted(sizes) and len(set(sizes)) == len(STAGES)


def test_token_ids_need_less_than_embeddings() -> None:
    """Each of the tokens has an id of four bytes by encoder, or states of two bytes by number."""
    recipe = load_recipe("digits")
    info = base_of(recipe).encoders
    tokens = load_recipe("digits", {"encode.text": "token_ids"})
    plain, less = (estimate_disk(one, base_of(one), 100, STAGES) for one in (recipe, tokens))
    encoders = len(base_of(recipe).family.clip_encoders)
    ids = 4 * encoders * info["tokens"]
    embeddings = 2 * (info["tokens"] * info["prompt_dim"] + info["pooled_dim"])
    assert plain["encode"] - less["encode"] == 100 * (embeddings - ids) > 0
    assert plain == {**less, "encode": plain["encode"]}


def test_prompts_of_a_file_are_drawn_like_those_of_the_recipe(tmp_path: Path) -> None:
    recipe, file = load_recipe("digits"), tmp_path / "prompts.txt"
    file.write_text("\n".join(recipe.evaluate.prompts["new"].prompts), encoding="utf-8")
    new = {"evaluate.prompts.new.prompts": [], "evaluate.prompts.new.file": str(file)}
    found = [
        estimate_disk(one, base_of(one), 1, STAGES) for one in (recipe, load_recipe("digits", new))
    ]
    assert found[0] == found[1]


def test_samples_of_epochs_are_counted_by_the_rows() -> None:
    every = {"train.sample_every_n_steps": 10, "train.global_batch_size": 10}
    steps = load_recipe("digits", every | {"train.steps": 10_000})
    epochs = load_recipe("digits", every | {"train.epochs": 2})
    found = [estimate_disk(one, base_of(one), 50_000, STAGES) for one in (steps, epochs)]
    assert found[0] == found[1]


def test_adapters_are_counted_as_they_are_trained() -> None:
    """298,560 numbers in the adapters of digits-lora, and checkpoints of three times as many."""
    recipe = load_recipe("digits-lora")
    found = estimate_disk(recipe, base_of(recipe), 1, STAGES)
    full = estimate_disk(load_recipe("digits"), base_of(recipe), 1, STAGES)
    kept = recipe.train.checkpoints_total_limit + 1
    copies = 3 + (recipe.train.ema_decay is not None)
    samples = full["train"] - (3 * 4 + 1) * 4 * 2_671_908
    assert found["train"] - samples == pytest.approx((kept * copies + 1) * 4 * 298_560)


def test_each_trial_of_a_sweep_is_counted_and_one_is_published(
    free: Callable[[int], None], tmp_path: Path
) -> None:
    ranks = [load_recipe("digits-lora", {"train.lora.rank": rank}) for rank in (2, 8)]
    small, large = (estimate_disk(one, base_of(one), 100, STAGES) for one in ranks)
    both = estimate_disk(ranks[0], base_of(ranks[0]), 100, STAGES, ranks)
    for stage in ("train", "evaluate"):
        assert both[stage] == small[stage] + large[stage]
    assert both["publish"] == large["publish"] > small["publish"]
    assert (both["download"], both["encode"]) == (small["download"], small["encode"])
    store = Store(str(tmp_path))
    free(sum(small.values()) + 10**6)
    check_disk(ranks[0], store, base_of(ranks[0]), 100, STAGES, [])
    with pytest.raises(Refused):
        check_disk(ranks[0], store, base_of(ranks[0]), 100, STAGES, [], ranks)


def test_the_best_checkpoint_counts_on_disk() -> None:
    held_out = {"train.holdout_loss.every_n_steps": 50}
    found = []
    for more in ({}, {"train.best_checkpoint": {}}, {"train.keep_best": 1}):
        recipe = load_recipe("digits", {**held_out, **more})
        found.append(estimate_disk(recipe, base_of(recipe), 1, STAGES)["train"])
    assert found[0] < found[1] == found[2]


def test_the_time_of_training_is_told_for_a_known_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus = [NvidiaGpu("NVIDIA H100 80GB HBM3", 80 * GIB)]
    monkeypatch.setattr(module, "find_gpus", lambda: gpus)
    recipe = load_recipe("sd2")
    assert module.training_time([recipe]) == "training about 0.3 h on H100 (at 20% of its peak)"
    assert str(module.training_time([recipe] * 3)).startswith("training about 0.8 h")
    changed = load_recipe("sd2", {"train.micro_batch_size": 3})
    assert module.training_time([changed]) is None
    assert module.training_time([recipe, changed]) is None
    gpus[0] = NvidiaGpu("NVIDIA Unheard-of", 80 * GIB)
    assert module.training_time([recipe]) is None


@pytest.mark.slow
def test_a_run_is_refused_after_its_list_is_planned(
    here: Here, api: str, small: dict[str, Any], free: Callable[[int], None], tmp_path: Path
) -> None:
    free(10**6)
    said = here("run", "digits", overrides=small, api=api, code=2)
    assert "its disk has 1 MB free" in said.splitlines()[-1]
    stages = {path.name for path in (tmp_path / "store").iterdir()}
    assert "plan" in stages and "download" not in stages
