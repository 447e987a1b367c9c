"""`kiln generate`: every option, on a published model."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from artifacts.gc import runs
from artifacts.records import digest_bytes
from artifacts.store import KeyParts, Store
from flows.generate import GenerateRun
from tasks.build_or_reuse import RECIPE
from tasks.publish.registry import Registry

pytestmark = pytest.mark.slow
COMMON = ("num_images_per_prompt=2", "device=cpu")
EVALUATED = {"num_inference_steps": 2, "guidance_scale": 3.0, "seed": 9}


@pytest.fixture
def registry(tiny_sdxl: Path, tmp_path: Path) -> Path:
    """A registry with the tiny pipeline as the champion, and a recipe."""
    draft = Store(str(tmp_path / "made")).draft(KeyParts("publish", 1, {}, {}))
    for path in sorted(p for p in tiny_sdxl.rglob("*") if p.is_file()):
        draft.upload(str(path), str(path.relative_to(tiny_sdxl)))
    draft.write(RECIPE, json.dumps({"evaluate": EVALUATED}).encode())
    registry = Registry(str(tmp_path / "registry"), "tiny")
    registry.promote(registry.publish(draft.commit({}, {"parents": {}})).name)
    return tmp_path / "registry"


def test_pictures_have_their_settings(
    registry: Path, tmp_path: Path, here: Callable[..., str], api: str
) -> None:
    (tmp_path / "prompts.txt").write_text("a cat\n\na dög\n", encoding="utf-8")
    store = f"store={tmp_path / 'store'}"

    def say(*more: str, model: str = "tiny", code: int = 0) -> str:
        options = [*COMMON, store, f"registry={registry}", *(m for m in more if m[0] != "-")]
        flags = [m for m in more if m[0] == "-"]
        given = [part for option in options for part in ("-o", option)]
        return here("generate", model, "--from-file", str(tmp_path / "prompts.txt"), *given, *flags,
                    "--out", str(tmp_path / "out"), code=code, api=api)  # fmt: skip

    def draw(*more: str) -> Any:
        return json.loads(say(*more, "--json").splitlines()[-1])

    first = draw("num_rounds=2", "grid_columns=4")
    assert first["outcome"] == "built" and first["pictures"] == 8
    assert 0 < first["first_seconds"] <= first["seconds"]
    folder = Path(first["folder"])
    files = sorted((folder / "samples").iterdir())
    pictures = [np.asarray(Image.open(path)) for path in files]
    listed = json.loads((folder / "pictures.json").read_text(encoding="utf-8"))
    prompts = ["a cat", "a cat", "a dög", "a dög"] * 2
    assert [one["prompt"] for one in listed["pictures"]] == prompts
    assert [one["noise"] for one in listed["pictures"]] == list(range(8))
    for path, one in zip(files, listed["pictures"], strict=True):
        said = json.loads(Image.open(path).text["parameters"])  # type: ignore[attr-defined]
        assert {**one, **listed["settings"]} == {**said, "file": one["file"]}
        assert (said["prompt"], said["noise"], said["seed"]) == (one["prompt"], one["noise"], 42)
    assert listed["settings"].items() >= (EVALUATED | {"seed": 42}).items()
    grid = np.asarray(Image.open(folder / "grid.png"))
    assert grid.shape == (2 * 32 + 2, 4 * 32 + 6, 3)
    np.testing.assert_array_equal(grid[34:, 34:66], pictures[5])

    said = ("num_inference_steps=2", "guidance_scale=3", "scheduler=null")
    shown = here("ls", "--store", str(tmp_path / "store"))
    assert re.search(r"^generate .* of tiny$", shown, re.MULTILINE)
    again = draw("num_rounds=2", "grid_columns=4", *said)  # as the recipe and the model have it
    assert again["outcome"] == "reused" and again["folder"] == first["folder"]
    assert draw("num_rounds=2", "grid_columns=8")["outcome"] == "reused"  # and laid out anew
    assert Image.open(folder / "grid.png").size == (8 * 32 + 14, 32)

    fixed = Path(draw("fixed_noise=true", "num_rounds=2", "--skip-grid")["folder"])
    assert not (fixed / "grid.png").exists()
    same = [np.asarray(Image.open(path)) for path in sorted((fixed / "samples").iterdir())]
    np.testing.assert_array_equal(same[0], same[4])
    np.testing.assert_array_equal(same[:2], pictures[:2])
    noise = [n["noise"] for n in json.loads((fixed / "pictures.json").read_text())["pictures"]]
    assert noise == [0, 1] * 4

    told = say("num_rounds=2", "grid_columns=4").splitlines()[-1]
    assert told == f"8 pictures, reused: {folder}"
    bare = draw("--skip-save", "num_rounds=2", "grid_columns=2")
    assert bare["outcome"] == "reused" and bare["folder"] == first["folder"]
    assert "ddim_eta is for scheduler ddim" in say("ddim_eta=0.5", "scheduler=euler", code=2)
    assert "height: 36 is not a multiple" in say("height=36", code=2)
    assert "v9: no such version" in say(model="tiny@v9", code=2)

    drawn = Store(str(tmp_path / "store"))
    made = {(artifact.stage, artifact.key) for artifact in drawn.artifacts()}
    assert made == {key for run in runs(drawn) for key in run.keys}  # `kiln gc` leaves them


@pytest.mark.extended
def test_a_picture_is_drawn_by_a_reference(
    tiny_flux2: Path, tmp_path: Path, here: Callable[..., str], api: str
) -> None:
    reference = tmp_path / "reference.png"
    Image.new("RGB", (64, 48), (200, 30, 30)).save(reference)
    (tmp_path / "notes.png").write_text("no picture")
    sizes = ("height=32", "width=48", "num_inference_steps=1", "num_images_per_prompt=1")
    given = [
        part for each in (*sizes, "device=cpu", f"store={tmp_path}/s") for part in ("-o", each)
    ]

    def say(*references: str, code: int = 0) -> str:
        flags = [part for name in references for part in ("--reference", str(tmp_path / name))]
        arguments = (str(tiny_flux2), "a cat", *flags, *given, "--out", str(tmp_path / "out"))
        return here("generate", *arguments, "--json", code=code, api=api)

    report = json.loads(say("reference.png").splitlines()[-1])
    (listed,) = Path(report["folder"]).glob("pictures.json")
    (digest,) = json.loads(listed.read_text())["settings"]["references"]
    assert digest == digest_bytes(reference.read_bytes())
    assert json.loads(say("reference.png").splitlines()[-1])["outcome"] == "reused"
    assert "notes.png cannot be read as a picture" in say("reference.png", "notes.png", code=2)


def test_pictures_have_no_stages_before_them(monkeypatch: pytest.MonkeyPatch) -> None:
    none: Any = None
    shown: list[object] = []
    monkeypatch.setattr(GenerateRun, "model_name", "tiny")
    monkeypatch.setattr(
        "tasks.build_or_reuse.show_in_prefect", lambda *given: shown.append(given[-1]())
    )
    run = GenerateRun(none, "a-run", none)
    for stage in ("generate", "download"):
        run.show(stage, "", list)
    assert shown == [[], []]
