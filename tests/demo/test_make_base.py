"""Building the base: settings are checked, and an interrupted build goes on where it stopped."""

from pathlib import Path

import pytest

from demo.base_config import load
from demo.make_base import stage

CONFIG = Path(__file__).parents[2] / "configs" / "digits-base.yaml"


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
