"""Pictures that the base draws as a source: drawn once, and read as a folder."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from shortest_recipe import shortest_recipe

from artifacts.store import Artifact, Store
from configs.errors import Refused
from configs.settings.data import DrawnSource
from configs.settings.recipe import Recipe
from runtimes.pipeline_folder.folder import Base
from runtimes.process.job import Events, GenerateJob, Job
from runtimes.sample.generate_job import generate
from tasks import download, drawn_source
from tasks.download.folders import Folder
from tasks.drawn_source import FOLDER, DrawnStage
from tasks.progress import Progress

pytestmark = pytest.mark.slow
PROMPTS = ["a cat", "a dog"]


def recipe_of(**source: Any) -> Recipe:
    evaluate = {
        "clip": "unused",
        "prompts": {"all": {"prompts": ["a"]}},
        "num_inference_steps": 2,
        "device": "cpu",
    }
    drawn = {"kind": "drawn", "prompts": PROMPTS, "count": 3, **source}
    return shortest_recipe(source=drawn, evaluate=evaluate)


@pytest.fixture
def draw(tiny_sdxl: Path, tmp_path: Path) -> Callable[..., tuple[Artifact, list[Job]]]:
    """`draw(**source)` is the stage's artifact and the jobs that it ran."""
    base = Base.open(tiny_sdxl)
    store = Store(str(tmp_path / "store"))

    def drawn(**source: Any) -> tuple[Artifact, list[Job]]:
        jobs = list[Job]()

        def run(job: Job, on_event: Callable[[dict[str, Any]], None]) -> Any:
            assert isinstance(job, GenerateJob)
            jobs.append(job)
            return generate(job, Events())

        recipe = recipe_of(**source)
        assert isinstance(recipe.source, DrawnSource)
        stage = DrawnStage(recipe, recipe.source, base, run)
        draft = store.draft(stage.parts)
        return draft.commit(stage.build(draft, Progress(stage.name)), {}), jobs

    return drawn


def pictures(artifact: Artifact, count: int) -> list[bytes]:
    return [artifact.read(f"{FOLDER}/{number:05d}.png") for number in range(count)]


def test_a_folder_has_each_picture_with_its_prompt_as_caption(draw: Callable[..., Any]) -> None:
    artifact, _ = draw()
    (piece,) = Folder(DrawnStage.folder(artifact)).pieces()
    rows = [row for table in piece.read() for row in table.to_pylist()]
    assert [row["captions"] for row in rows] == [["a cat"], ["a dog"], ["a cat"]]
    assert len(set(pictures(artifact, 3))) == 3  # each has its own noise


def test_a_larger_count_draws_the_further_parts_alone(
    draw: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(drawn_source, "PART", 2)
    few, jobs = draw(count=2)
    assert [job.first for job in jobs] == [0]
    more, jobs = draw(count=5)
    assert [(job.first, job.prompts) for job in jobs] == [(2, ("a cat", "a dog")), (4, ("a cat",))]
    assert pictures(more, 2) == pictures(few, 2)
    assert few.key != more.key


def test_own_settings_of_the_sampler_are_over_those_of_the_evaluation() -> None:
    recipe = recipe_of(guidance_scale=1.5, seed=7)
    assert isinstance(recipe.source, DrawnSource)
    sampling = drawn_source.sampling_of(recipe, recipe.source)
    assert (sampling.num_inference_steps, sampling.guidance_scale, sampling.seed) == (2, 1.5, 7)


def test_wrong_prompts_and_samplers_are_refused_before_the_run(tiny_sdxl: Path) -> None:
    recipe = recipe_of(prompts=[], file="/nowhere/prompts.txt")
    with pytest.raises(Refused, match=r"source\.file: /nowhere/prompts\.txt"):
        download.check(recipe)
    recipe = recipe_of(scheduler="dpm++", num_inference_steps=1001)
    with pytest.raises(Refused, match=r"source\.num_inference_steps: .* not 1001"):
        drawn_source.check(recipe, Base.open(tiny_sdxl))
