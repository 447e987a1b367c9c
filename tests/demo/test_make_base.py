"""Building the base: settings are checked, and an interrupted build goes on where it stopped."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from safetensors import safe_open

from demo.base_config import load
from demo.make_base import make_base, stage

CONFIG = Path(__file__).parents[2] / "configs" / "digits-base.yaml"
SHIPPED = Path(__file__).parents[2] / "demo" / "base"


def test_the_shipped_settings_load() -> None:
    assert load(CONFIG).unet.steps > 0


@pytest.mark.parametrize(
    ("old", "new", "complaint"),
    [
        ("learning_rate: 1.0e-3", "learning_rate: 1e-3", r"write 1\.0e-3"),
        ("snr_gamma:", "snr_gama:", r"missing settings \['snr_gamma'\].*\['snr_gama'\]"),
    ],
)
def test_a_wrong_setting_is_named(tmp_path: Path, old: str, new: str, complaint: str) -> None:
    wrong = tmp_path / "wrong.yaml"
    wrong.write_text(CONFIG.read_text().replace(old, new))
    with pytest.raises(ValueError, match=complaint):
        load(wrong)


def test_a_stage_is_built_once_a_recipe_and_goes_on_after_an_interruption(tmp_path: Path) -> None:
    seen: list[list[str]] = []

    def build(folder: Path) -> None:
        seen.append(sorted(path.name for path in folder.iterdir()))
        (folder / "progress").touch()
        if len(seen) == 1:
            raise KeyboardInterrupt

    folder = tmp_path / "unet"
    with pytest.raises(KeyboardInterrupt):
        stage(folder, {"steps": 1}, build)
    stage(folder, {"steps": 1}, build)
    stage(folder, {"steps": 1}, build)
    assert seen == [["stage.json"], ["progress", "stage.json"]]

    stage(folder, {"steps": 2}, build)
    assert seen[-1] == ["stage.json"]


def layout(folder: Path) -> dict[str, object]:
    """Files of a base: the names and shapes of weights, settings but for what was measured."""
    found: dict[str, object] = {}
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        if path.suffix == ".safetensors":
            with safe_open(path, "np") as weights:
                found[name] = {key: weights.get_slice(key).get_shape() for key in weights.keys()}  # noqa: SIM118
        elif path.suffix == ".json":
            facts = json.loads(path.read_text())
            measured = {"scaling_factor", "_name_or_path"}
            found[name] = {k: v for k, v in facts.items() if k not in measured}
        elif path.is_file():
            found[name] = None
    return found


@pytest.mark.soak
def test_a_base_made_of_a_few_steps_is_laid_out_as_the_shipped_one(tmp_path: Path) -> None:
    config = load(CONFIG)
    config = replace(
        config,
        clip=replace(config.clip, steps=2, batch_size=8),
        vae=replace(config.vae, steps=2),
        unet=replace(config.unet, steps=2, pictures=64, batch_size=8, lr_warmup_steps=1),
        sampling=replace(config.sampling, num_inference_steps=2),
    )
    make_base(config, tmp_path / "work", tmp_path / "base")  # and draws with it, to measure it
    assert layout(tmp_path / "base") == layout(SHIPPED)
