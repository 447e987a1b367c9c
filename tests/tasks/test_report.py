"""The report: one self-contained page, also with hostile text, that works in a browser."""

import json
import re
import subprocess
from collections.abc import Callable
from html import unescape
from pathlib import Path
from typing import Any

import pytest
from chromium import CHROMIUM, chromium, require_chromium
from picture_bytes import noise_picture
from picture_server import picture

from artifacts.store import Artifact, KeyParts, Store
from configs.load_recipe import load_recipe
from flows.store_commands import _lineage
from tasks.build_or_reuse import StageResult
from tasks.panels import (
    LARGE,
    LARGE_SUM,
    Chart,
    Comparison,
    Facts,
    Panel,
    PicturePanel,
    Strip,
    Table,
)
from tasks.panels_charts import intervals_chart, loss_chart
from tasks.publish import register
from tasks.publish.registry import Version
from tasks.publish.stage import CHAMPION_EVALUATION, lineage_nodes
from tasks.train import SAMPLES_SHOWN

HOSTILE = "</script><script>alert(1)</script>\"'><img src=http://x/y onerror=alert(1)>"
#: Moves each slider as a reader would, and writes what is visible into an attribute.
DRIVE = """<script>
const move = (input, value) => { input.value = value; input.dispatchEvent(new Event("input")); };
const images = (root) => [...root.querySelectorAll("img")];
const shown = (root) => images(root).filter((image) => !image.hidden).map((image) => image.alt);
const fetched = (entry) => !entry.name.startsWith("data:");
const strip = document.querySelector(".frames"), compared = document.querySelector(".compared");
move(strip.querySelector("input"), 0);
move(compared.querySelector("input"), 25);
const [left, right] = compared.querySelectorAll("select");
left.value = 1; left.dispatchEvent(new Event("change"));
document.body.dataset.seen = JSON.stringify({
  frames: shown(strip), said: strip.querySelector("output").textContent,
  pair: shown(compared.querySelector(".pair")),
  clip: getComputedStyle(compared.querySelector(".right")).clipPath,
  fetched: performance.getEntriesByType("resource").filter(fetched).length,
  wide: document.documentElement.scrollWidth > innerWidth,
});
</script></body>"""


def panels(artifact: Artifact) -> list[Panel]:
    history = [{"step": n, "loss": 1 / n, "learning_rate": 1e-3} for n in range(1, 9)]
    models = ("base", "champion", "tuned")
    return [
        Table(HOSTILE, [{"caption": HOSTILE, "url": "http://x/y"}]),
        Chart("Loss", loss_chart(history)),
        Strip("Samples", [(f"step {n}", picture(n)) for n in range(3)]),
        Comparison(
            "Pictures", models, [(HOSTILE, [picture(9), picture(8), picture(7)])], picture(1)
        ),
        PicturePanel(HOSTILE, picture(3)),
    ]


def commit(
    store: Store, stage: str, inputs: dict[str, str], forced: str | None = None, **run: Any
) -> Artifact:
    draft = store.draft(KeyParts(stage, 1, {}, inputs))
    draft.write("metrics.json", b"{}")
    return draft.commit(
        {"fingerprint": "f", "forced": forced},
        {"reason": "changed: train.steps", "seconds": 2, **run},
    )


def page(
    tmp_path: Path,
    show: Callable[[Artifact], list[Panel]] = panels,
    forced: str | None = None,
    overrides: dict[str, Any] | None = None,
) -> str:
    store = Store(str(tmp_path / "store"))
    stages = []
    for name, outcome in (("download", "reused"), ("encode", "built"), ("train", "built")):
        artifact = commit(store, name, {}, forced if name == "train" else None)
        result = StageResult(name, artifact.key, artifact.uri, artifact.digest, outcome, 0.1)
        stages.append((artifact, result))
    recipe = load_recipe("digits", {"description": HOSTILE, "source.seed": 77, **(overrides or {})})
    return register.page(recipe, stages, dict.fromkeys(["download", "encode", "train"], show))


def test_hostile_text_is_escaped_and_nothing_is_fetched(tmp_path: Path) -> None:
    html = page(tmp_path)
    assert html.count("<script") == html.count("</script>") == 1
    assert "<img src=http" not in html and "onerror=alert(1)>" not in html
    sources = re.findall(r'(?:src|href)="([^"]*)"', html)
    assert sources and all(source.startswith(("data:image/", "#")) for source in sources)
    assert "default-src 'none'; img-src data:" in html
    assert all(alt for alt in re.findall(r'<img [^>]*alt="([^"]*)"', html))
    assert html.count("<img ") == len(re.findall(r'<img [^>]*alt="', html))


def test_each_stage_has_its_outcome_and_reason(tmp_path: Path) -> None:
    html = page(tmp_path)
    rows = re.findall(r"<tr><td>(\w+)</td><td>(\w+)</td><td>([^<]*)</td>", html)
    assert rows == [
        ("download", "reused", "its settings and inputs are unchanged"),
        ("encode", "built", "changed: train.steps"),
        ("train", "built", "changed: train.steps"),
    ]
    assert "<dt>seed</dt><dd>77</dd>" in html, "the source's settings"


@pytest.mark.parametrize(
    ("forced", "rules", "kind", "said"),
    [
        (None, ["cmmd < base", "memorized <= 0.01"], "passed", "✓ passed all 2 rules"),
        (None, ["cmmd < base"], "passed", "✓ passed its rule"),
        ("a demo", ["cmmd < base"], "forced", "✗ failed, and forced: a demo"),
        (None, [], "unjudged", "published without rules"),
    ],
)
def test_only_a_passed_gate_has_a_check_mark(
    tmp_path: Path, forced: str | None, rules: list[str], kind: str, said: str
) -> None:
    html = page(tmp_path, forced=forced, overrides={"publish.gate": rules})
    header = html.partition("<header>")[2].partition("</header>")[0]
    assert f'<dt>Verdict</dt><dd class="{kind}">{said}</dd>' in header
    assert html.count("✓") == (kind == "passed"), "no mark of the style sheet either"


def test_settings_and_facts_have_no_path_of_this_machine(tmp_path: Path) -> None:
    def show(artifact: Artifact) -> list[Panel]:
        return [Facts("Model", {"where": artifact.uri, "steps": 3})]

    source = {"kind": "folder", "path": f"{tmp_path}/pictures"}
    html = page(tmp_path, show, overrides={"store": f"{tmp_path}/store", "source": source})
    assert str(tmp_path) not in html
    assert "<dt>path</dt><dd>pictures</dd>" in html
    assert re.search(r"<dt>where</dt><dd>train/\w{64}</dd>", html)


def noise(limit: int) -> bytes:
    """A PNG a little below a limit in bytes."""
    side = int((0.995 * limit / 3) ** 0.5)
    picture = noise_picture(limit, side, side)
    assert 0.9 * limit < len(picture) <= limit
    return picture


def largest_panels(artifact: Artifact) -> list[Panel]:
    """The panels of all stages, each with the most that it may hold: noise up to its limit."""
    if artifact.stage != "train":
        return []
    models, words = ("base", "champion", "tuned"), "a long prompt of many words " * 12
    history = [{"step": n, "loss": 1 / n, "learning_rate": 1e-3} for n in range(1, 200_001)]
    metric = {"value": 0.123456, "ci": [0.1, 0.2], "n": 2000, "resamples": 1000, "interval": "x"}
    metrics = {f"clip_score/set{n}": dict.fromkeys(models, metric) for n in range(60)}
    rows = [{"metric": name, **dict.fromkeys(models, "0.1234 [0.1, 0.2]")} for name in metrics]
    outcomes = [{"outcome": f"reason {n}", "rows": n, "share": "1%"} for n in range(200)]
    pair, frame = (noise(LARGE_SUM // share) for share in (20 * 3, SAMPLES_SHOWN + 1))
    pictures = [pair, pair, noise(LARGE_SUM // 20)]  # the last one is to be made smaller
    return [
        Table("Outcomes", outcomes, bars="rows"),
        PicturePanel("Some of the pictures", noise(LARGE)),
        Chart("Loss", loss_chart(history)),
        Strip("Samples", [(f"step {n}", frame) for n in range(SAMPLES_SHOWN + 1)]),
        Comparison("Pictures", models, [(words, pictures) for _ in range(20)], pair),
        Chart("Metrics", intervals_chart(metrics, lambda name: False)),
        Table("Metrics", rows),
        PicturePanel("Samples closest to training pictures", noise(LARGE)),
    ]


@pytest.mark.slow
def test_the_largest_page_is_below_five_megabytes(tmp_path: Path) -> None:
    size = len(page(tmp_path, largest_panels).encode())
    assert 4_000_000 < size < 5_000_000, "pictures share LARGE and LARGE_SUM"


def test_the_lineage_has_every_artifact_once_and_inputs_from_elsewhere(tmp_path: Path) -> None:
    store = Store(str(tmp_path))

    def parents(**found: Artifact) -> dict[str, Any]:
        return {"parents": {n: {"stage": a.stage, "key": a.key} for n, a in found.items()}}

    images = commit(store, "download", {"source": "s" * 64})
    latents = commit(store, "encode", {"images": images.digest}, **parents(images=images))
    inputs = {"images": images.digest, "latents": latents.digest, "base": "b" * 64}
    measured = commit(store, "evaluate", inputs, **parents(images=images, latents=latents))
    nodes = lineage_nodes(measured)
    titles = {node.title: {nodes[i].title for i in node.inputs} for node in nodes.values()}
    assert titles == {
        "source": set(),
        "download": {"source"},
        "encode": {"download"},
        "base model": set(),
        "evaluate": {"base model", "download", "encode"},
    }
    store.fs.rm(latents.path, recursive=True)
    titles_left = {node.title for node in lineage_nodes(measured).values()}
    assert "latents" in titles_left, "a deleted artifact is named by its input"


def test_a_champion_measured_again_is_an_evaluation_beside_the_champion(tmp_path: Path) -> None:
    """The input `champion` is the digest of a published folder."""
    store = Store(str(tmp_path))
    again = commit(store, "evaluate", {"clip": "c" * 64})
    found = {CHAMPION_EVALUATION: {"stage": again.stage, "key": again.key}}
    model = commit(store, "publish", {"champion": "f" * 64}, parents=found)
    assert [node.title for node in lineage_nodes(model).values()][-1] == "publish"
    assert again.key in lineage_nodes(model)[model.key].inputs
    assert list(_lineage(store, model)) == [
        (0, "champion", "f" * 12),
        (0, CHAMPION_EVALUATION, f"evaluate/{again.key[:12]}"),
        (1, "clip", "c" * 12),
    ]


@pytest.mark.parametrize("fingerprint", ["f", "g"])
def test_only_a_comparable_champion_is_shown(tmp_path: Path, fingerprint: str) -> None:
    store = Store(str(tmp_path))
    theirs, ours = (commit(store, "evaluate", {"model": name}) for name in "ab")
    ours.manifest["summary"]["fingerprint"] = fingerprint
    run = {"parents": {"evaluation": {"stage": "evaluate", "key": theirs.key}}}
    champion = Version("v1", "", {"run": run})
    model = commit(store, "publish", {"model": "b"})
    found = register.champion_evaluation(champion, ours, model)
    assert (found is not None and found.key == theirs.key) == (fingerprint == "f")
    assert register.champion_evaluation(champion, theirs, model) is None, "the model itself"
    assert register.champion_evaluation(None, ours, model) is None


def test_the_measurement_of_the_gate_is_shown_of_a_champion(tmp_path: Path) -> None:
    store = Store(str(tmp_path))
    theirs, ours, again = (commit(store, "evaluate", {"model": name}) for name in "abc")
    run = {"parents": {"evaluation": {"stage": "evaluate", "key": theirs.key}}}
    remeasured = {CHAMPION_EVALUATION: {"stage": again.stage, "key": again.key}}
    model = commit(store, "publish", {"model": "b"}, parents=remeasured)
    found = register.champion_evaluation(Version("v1", "", {"run": run}), ours, model)
    assert found is not None and found.key == again.key


@pytest.mark.slow
@pytest.mark.parametrize("width", [500, 1200])
def test_sliders_work_in_chromium_and_nothing_is_fetched(tmp_path: Path, width: int) -> None:
    require_chromium(driven=False)
    html = page(tmp_path).replace("</body>", DRIVE)
    (tmp_path / "report.html").write_text(html, encoding="utf-8")
    options = ["--headless=new", "--no-sandbox", "--disable-gpu", f"--window-size={width},900"]
    profile = f"--user-data-dir={tmp_path}/profile"
    done = subprocess.run(
        [CHROMIUM, *options, profile, "--dump-dom", f"file://{tmp_path}/report.html"],
        capture_output=True,
        text=True,
        timeout=120,
    )
    (seen,) = re.findall(r'data-seen="([^"]*)"', done.stdout)
    found = json.loads(unescape(seen))
    assert found["frames"] == ["Samples: step 0"] and found["said"] == "step 0"
    assert [alt.partition(":")[0] for alt in found["pair"]] == ["champion", "tuned"]
    assert found["clip"] == "inset(0px 0px 0px 25%)"
    assert found["fetched"] == 0 and not found["wide"]


@pytest.mark.slow
@pytest.mark.soak
def test_sliders_work_by_the_keyboard_alone(tmp_path: Path) -> None:
    require_chromium()
    (tmp_path / "report.html").write_text(page(tmp_path), encoding="utf-8")
    with chromium() as browser:
        browser.open(f"file://{tmp_path}/report.html", "What was built, and why")
        keys, strip = browser.page.keyboard, browser.page.locator(".frames").first
        compared = browser.page.locator(".compared").first

        def tab_to(place: Any) -> None:
            """Press Tab until the keyboard is there."""
            for _ in range(60):
                if place.evaluate("element => element === document.activeElement"):
                    return
                keys.press("Tab")
            raise AssertionError("the Tab key does not reach it")

        def seen() -> tuple[list[str], str]:
            alts = "all => all.filter(one => one.checkVisibility()).map(one => one.alt)"
            return strip.locator("img").evaluate_all(alts), strip.locator("output").inner_text()

        def split() -> str:
            clip = "element => getComputedStyle(element).clipPath"
            return str(compared.locator(".right").first.evaluate(clip))

        assert seen() == (["Samples: step 2"], "step 2")
        tab_to(strip.locator("input"))
        outline = "element => getComputedStyle(element).outlineStyle"
        assert strip.locator("input").evaluate(outline) == "solid", "the reader sees where it is"
        for key, step in (("ArrowLeft", 1), ("ArrowLeft", 0), ("ArrowRight", 1), ("End", 2)):
            keys.press(key)
            assert seen() == ([f"Samples: step {step}"], f"step {step}")
        tab_to(compared.locator("input"))
        assert split() == "inset(0px 0px 0px 50%)"
        for key, share in (("ArrowRight", 51), ("ArrowRight", 52), ("ArrowLeft", 51), ("End", 100)):
            keys.press(key)
            assert split() == f"inset(0px 0px 0px {share}%)"
        tab_to(compared.locator("select").last)
        keys.press("ArrowUp")  # from tuned to champion
        assert compared.locator(".right").first.get_attribute("alt").startswith("champion: ")
        assert browser.errors == []
