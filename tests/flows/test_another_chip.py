"""A run killed on one runtime resumes on another: the same recipe with `-o runtime=`."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import chips
import compiled_programs
import numpy as np
import published
import pytest
from kill_training import kill_training
from safetensors.numpy import load_file
from tolerances import LOSS, WEIGHTS

from configs.load_recipe import load_recipe

pytestmark = pytest.mark.slow
STEPS, SAVED = 12, 4
Overrides = dict[str, Any]
Here = Callable[..., str]  # of conftest.py, as is the next
RunHere = Callable[..., dict[str, Any]]


@pytest.fixture
def recipe(small: Overrides, tiny_model: Callable[[str], Path], tiny_clip: Path) -> Overrides:
    """Overrides of `digits` for a few steps of a tiny model in float32."""
    return {
        **small,
        "model.path": str(tiny_model("least-sdxl")),
        "evaluate.clip": str(tiny_clip),
        "evaluate.judges": [],
        "train.steps": STEPS,
        "train.lr_warmup_steps": 2,
        "train.checkpointing_steps": SAVED,
        "train.sample_every_n_steps": 0,
    }


def saved(store: Path) -> list[int]:
    """The steps whose checkpoints are committed."""
    found = store.glob("train/*/checkpoints/step-*/manifest.json")
    return sorted(int(path.parent.name.removeprefix("step-")) for path in found)


@pytest.mark.extended
def test_a_run_killed_on_torch_resumes_on_jax_and_back(
    tmp_path: Path, recipe: Overrides, here: Here, run_here: RunHere, api: str
) -> None:
    store = Path(recipe["store"])
    compiled_programs.keep(store)

    def killed(**more: str) -> None:
        """A run whose training is killed at its second checkpoint."""
        overrides = {**recipe, **more}
        run = partial(here, "run", "digits", overrides=overrides, code=1, api=api)
        kill_training(run, tmp_path, 2)

    killed()
    assert saved(store) == [4]
    with chips.standing_in("jax"):
        killed(runtime="jax")
    assert saved(store) == [4, 8]  # begun anew, it would have been killed at 8

    report = run_here("digits", recipe)
    assert report["status"] == "published"
    assert published.manifest(report, "train")["run"]["resumed_from"] == 8
    assert [path.name for path in published.folder(report, "train").parent.iterdir()] == [
        report["stages"]["train"]["key"]
    ]
    alone = published.train_apart(load_recipe("digits", recipe), report, tmp_path / "alone")
    losses = [line["loss"] for line in published.history(published.folder(report, "train"))]
    expected = [line["loss"] for line in published.history(alone)]
    assert losses[:4] == expected[:4]
    assert losses[4:8] != expected[4:8]  # jax's last bits are its own
    assert losses == pytest.approx(expected, rel=LOSS)
    name = "unet/diffusion_pytorch_model.safetensors"
    weights = load_file(published.folder(report, "train") / name)
    for layer, array in load_file(alone / name).items():
        furthest = np.abs(weights[layer] - array).max()
        assert furthest <= WEIGHTS * max(np.abs(array).max(), 1e-3), layer
