"""`kiln doctor RECIPE`: the recipe's models, source, store, token and runtime are reached."""

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import picture_sources
import pytest
from hub_server import HubServer, Repository
from loopback_server import refusing
from safetensors.numpy import save_file

from artifacts.records import FORMAT, encode_record
from configs.checks import Finding, collect
from configs.errors import Away
from configs.load_recipe import load_recipe
from configs.settings.describe import Describe
from configs.settings.recipe import Recipe
from flows.doctor import examine, recipe_checks
from flows.run import enter_before_server, prepare
from runtimes.contract import Probe
from runtimes.detect_hardware import NvidiaGpu
from runtimes.torch_models.gpu_specs import GIB
from tasks import preflight
from tasks.evaluate import inception
from tasks.preflight import Doors
from tasks.publish.hub import check_login

Here = Callable[..., str]  # of conftest.py
CPU = {name: Probe(True, ["cpu (1 threads)"]) for name in ("torch", "xla", "jax", "mindspore")}
WEIGHTS = "unet/diffusion_pytorch_model.safetensors"
MODEL = {"model_index.json": b"{}", WEIGHTS: b"not fetched"}


def check(recipe: Recipe) -> dict[str, list[str]]:
    """Findings by level."""
    found: dict[str, list[str]] = {"ok": [], "note": [], "problem": []}
    for finding in collect(recipe_checks(recipe, [recipe.name])):
        found[finding.level].append(finding.words)
    return found


@pytest.fixture
def sd2(tmp_path: Path, hub: HubServer) -> Recipe:
    """The recipe sd2 with all that it names on the hub; its store is in a folder."""
    recipe = load_recipe("sd2", {"store": str(tmp_path / "new/store")})
    pictures = picture_sources.make_pictures(3)
    picture_sources.write_dataset(tmp_path / "dataset", pictures)
    files = {f"data/{p.name}": p.read_bytes() for p in (tmp_path / "dataset").rglob("*.parquet")}
    for name in (recipe.model.path, recipe.evaluate.clip):
        hub.repositories[name] = Repository(dict(MODEL))
    hub.repositories[f"datasets/{recipe.source.path}"] = Repository(files)  # type: ignore[union-attr]
    return recipe


def test_a_recipe_whose_places_answer_has_no_problem(sd2: Recipe, hub: HubServer) -> None:
    found = check(sd2)
    assert found["problem"] == []
    assert f"model.path: {sd2.model.path} (on the hub, 2 files)" in found["ok"]
    assert any(line.startswith("source: ") and line.endswith(" opens") for line in found["ok"])


def test_the_models_of_describers_are_looked_for(sd2: Recipe, hub: HubServer) -> None:
    hub.repositories["team/clip"] = Repository(dict(MODEL))
    describers = {
        "clip": {"kind": "clip", "model": "team/clip"},
        "nsfw": {"kind": "onnx", "model": "absent.onnx", "labels": ["a"]},
    }
    describe = Describe.model_validate({"describers": describers})
    found = check(sd2.model_copy(update={"describe": describe}))
    assert "describe.describers.clip.model: team/clip (on the hub, 2 files)" in found["ok"]
    (problem,) = found["problem"]
    assert problem.startswith("describe.describers.nsfw.model: file absent.onnx: no such file")
    assert f"store: {sd2.store} can be written" in found["ok"]
    fetched = [path for method, path in hub.requests if method == "GET" and WEIGHTS in path]
    assert fetched == []
    assert not os.path.exists(sd2.store)


def test_weights_of_inception_need_their_file_and_torch_fidelity(
    sd2: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = tmp_path / "inception.pth"
    named = {"evaluate": sd2.evaluate.model_copy(update={"inception": str(weights)})}
    recipe = sd2.model_copy(update=named)
    (said,) = check(recipe)["problem"]
    assert "inception.pth: no such file" in said
    weights.write_bytes(b"weights")
    monkeypatch.setattr(inception, "ENVIRONMENT", "-absent")
    found = check(recipe)
    assert f"evaluate.inception: {weights} (local file)" in found["ok"]
    (said,) = found["problem"]
    assert "run `make setup-fidelity`" in said


def test_a_setting_without_effect_is_a_note_and_leaves_the_plan(sd2: Recipe) -> None:
    lora = sd2.train.lora.model_copy(update={"rank": 7})
    changed = {"train": sd2.train.model_copy(update={"lora": lora})}
    found = check(sd2.model_copy(update=changed))
    said = "train.lora has no effect with train.method: full"
    assert found == {**check(sd2), "note": [said, *check(sd2)["note"]]}


def test_a_model_that_left_the_hub_is_a_problem(sd2: Recipe, hub: HubServer) -> None:
    del hub.repositories[sd2.model.path]
    (said,) = check(sd2)["problem"]
    assert said.startswith(
        f"model.path: model {sd2.model.path}: no such folder, and the hub has no"
    )
    assert said.endswith("set model.path to a folder, .safetensors file, URL or hub id")


def test_adapters_as_a_base_have_one_remedy(sd2: Recipe, tmp_path: Path) -> None:
    file = tmp_path / "lora.safetensors"
    save_file({"lora_unet_x.lora_down.weight": np.zeros((2, 2), np.float32)}, file)
    model = sd2.model.model_copy(update={"path": str(file)})
    (said,) = check(sd2.model_copy(update={"model": model}))["problem"]
    assert said.endswith(
        "adapters, not a model: set the model that they are for, and train.lora.start to this file"
    )


def test_a_gated_model_that_lists_its_files_is_a_problem(sd2: Recipe, hub: HubServer) -> None:
    hub.repositories[sd2.model.path].accepted_by = {"hf_other"}
    (said,) = check(sd2)["problem"]
    assert "gated: accept its terms at" in said and "HF_TOKEN" in said


def test_a_model_without_safetensors_is_a_problem(sd2: Recipe, hub: HubServer) -> None:
    files = hub.repositories[sd2.model.path].files
    files["v2.safetensors"] = files.pop(WEIGHTS)  # a checkpoint file, which nothing reads
    (said,) = check(sd2)["problem"]
    assert "it has no .safetensors weights by the names of diffusers" in said


def test_a_tar_of_a_range_that_is_gone_is_a_problem(sd2: Recipe, tmp_path: Path) -> None:
    picture_sources.write_tars(tmp_path / "tars", picture_sources.make_pictures(8))
    path = f"{tmp_path}/tars/{{00000..00001}}.tar"
    from_tars = load_recipe("sd2", {"store": sd2.store, "source": {"kind": "tars", "path": path}})
    found = check(from_tars)
    assert found["problem"] == [] and f"source: {path} opens" in found["ok"]
    (tmp_path / "tars/00001.tar").unlink()
    (said,) = check(from_tars)["problem"]
    assert said.startswith(f"source.path: {tmp_path}/tars/00001.tar: no such file")


def test_a_data_set_that_is_gone_is_a_problem(sd2: Recipe, hub: HubServer) -> None:
    del hub.repositories[f"datasets/{sd2.source.path}"]  # type: ignore[union-attr]
    (said,) = check(sd2)["problem"]
    assert "lambda/naruto-blip-captions" in said


def test_a_hub_that_cannot_be_reached_is_a_problem(
    sd2: Recipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    recipe = sd2.model_copy(update={"source": load_recipe("digits").source})
    said = check(recipe)["problem"]
    assert len(said) == 2
    assert all("the hub cannot be reached at http://127.0.0.1:9" in words for words in said)


def test_a_store_that_cannot_be_written_is_a_problem(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    recipe = load_recipe("digits", {"store": str(tmp_path / "file/store")})
    (said,) = check(recipe)["problem"]
    assert said.startswith("store: ") and "set `store` to another folder" in said
    kept = load_recipe("digits", {"store": str(tmp_path)})
    assert check(kept)["problem"] == [] and tmp_path.is_dir()


def test_a_bucket_is_a_store_and_a_model(url_of: Callable[[str], str]) -> None:
    import fsspec

    url = url_of("memory")
    fs, root = fsspec.core.url_to_fs(url)
    recipe = load_recipe("digits", {"store": f"{url}/store", "model.path": f"{url}/model"})
    assert [s.split(": ")[2] for s in check(recipe)["problem"]] == ["no files there"]
    fs.pipe_file(f"{root}/model/model_index.json", b"{}")
    assert check(recipe)["problem"] == []
    assert fs.find(f"{root}/store") == []


def test_a_runtime_that_is_not_here_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    absent = load_recipe("digits", {"train.device": "cuda:1"})
    assert "train.device: cuda:1 is not on this machine (cpu" in check(absent)["problem"][0]
    nothing = Probe(False, [], {}, "no device: use another")
    monkeypatch.setattr("runtimes.registry.check_installed", lambda name: None)
    monkeypatch.setattr("runtimes.registry.probe_runtime", lambda name: nothing)
    (said,) = check(load_recipe("digits", {"runtime": "xla"}))["problem"]
    assert said == "runtime xla: no device: use another"


def test_a_token_that_the_hub_refuses_is_a_problem_where_one_is_needed(
    hub: HubServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    push = load_recipe("digits", {"publish.hub": {"repo": "me/digits"}})
    assert "publish.hub needs a hub token: hf auth login" in check(push)["problem"][0]
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    assert "the hub does not accept it" in check(push)["problem"][0]
    assert "the hub does not accept it" in check(load_recipe("digits"))["note"][-1]
    hub.writers.add("hf_wrong")
    assert check(push)["problem"] == [] and "hub token: of tests" in check(push)["ok"]


def memory(recipe: Recipe, *words: str) -> list[Finding]:
    """The findings of the memory alone."""
    models = Doors(recipe, fetch=False, words=words).models()
    return list(collect(check for check in models if check.name == "memory"))


@pytest.mark.parametrize(("gib", "level"), [(24, "problem"), (80, "ok")])
def test_a_recipe_that_does_not_fit_the_gpu_is_a_problem(
    gib: int, level: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preflight, "usable_gpus", lambda: [NvidiaGpu("a GPU", gib * GIB)])
    (found,) = memory(load_recipe("sdxl"))
    assert found.level == level
    changed = load_recipe("sdxl", {"train.micro_batch_size": 1})
    (said,) = memory(changed, "my.yaml", "-o", "train.micro_batch_size=1")
    command = f"kiln plan my.yaml -o train.micro_batch_size=1 --gpu {gib}GB"
    assert said.words.endswith(command) and said.level == "note"
    (chosen,) = memory(load_recipe("sdxl", {"train.memory": "auto"}))
    assert chosen.level == ("ok" if level == "ok" else "note")


@pytest.mark.parametrize(
    "elsewhere", [{"train.device": "cpu"}, {"place.train": "gpu"}, {"runtime": "jax"}]
)
def test_memory_is_not_asked_for_where_a_run_does_not_ask(
    elsewhere: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preflight, "usable_gpus", lambda: [NvidiaGpu("a GPU", GIB)])
    assert memory(load_recipe("sdxl", elsewhere)) == []


def test_devices_of_other_machines_are_not_asked_for() -> None:
    cuda = {"encode.device": "cuda", "train.device": "cuda", "evaluate.device": "cpu"}
    remote = {"place.train": "gpu", "encode.beam": {"runner": "FlinkRunner"}}
    assert len(check(load_recipe("digits", cuda))["problem"]) == 1
    found = check(load_recipe("digits", cuda | remote))["problem"]
    assert not [words for words in found if "cuda" in words]


@pytest.mark.parametrize(
    ("wrong", "line"),
    [
        ({"publish.gate": ["clip_scor > base"]}, "clip_scor is not measured"),
        ({"publish.signing_key": "none.pem"}, "signing key none.pem"),
        (
            {"evaluate.prompts": {"new": {"prompts": [], "file": "none.txt"}}},
            "evaluate.prompts.new.file: none.txt: no such file",
        ),
    ],
)
def test_a_gate_and_prompts_that_a_run_refuses_are_problems(
    wrong: dict[str, Any], line: str
) -> None:
    [found] = check(load_recipe("digits", wrong))["problem"]
    assert line in found


@pytest.mark.parametrize(
    ("prompts", "level", "line"),
    [
        (2, "problem", "± 12.7 standard errors wide with 2 prompts (± 2.4 with 8): list 5 or more"),
        (5, "note", "lost a tenth of what the rule allows would pass in about 46% of its runs"),
    ],
    ids=["refused", "told"],
)
def test_a_rule_on_few_prompts_is_refused_or_told(prompts: int, level: str, line: str) -> None:
    rule = "clip_score/old >= base * 0.9 at 95%"
    digits = ("zero", "one", "two", "three", "four")[:prompts]
    old = [f"a handwritten {digit} in red ink on white paper" for digit in digits]
    few = {"evaluate.prompts.old": {"prompts": old, "images_per_prompt": 1}, "publish.gate": [rule]}
    told = [words for words in check(load_recipe("digits", few))[level] if rule in words]
    assert len(told) == 1 and line in told[0]


def test_prompts_of_a_store_that_is_away_are_one_problem() -> None:
    with refusing() as host:
        prompts = {"evaluate.prompts": {"new": {"prompts": [], "file": f"http://{host}/a.txt"}}}
        [found] = check(load_recipe("digits", prompts))["problem"]
    assert found.startswith("evaluate.prompts.new.file: ") and found.endswith(": run again later")


def test_wrong_input_is_exit_code_2(here: Here) -> None:
    assert "sdxl" in here("doctor", "sdxll", code=2)
    assert "-o needs a recipe" in here("doctor", "-o", "train.steps=1", code=2)
    assert "--schema is of all recipes" in here("recipes", "digits", "--schema", code=2)
    settings: dict[str, Any] = {"train.stpes": 1}
    assert "train.steps" in here("doctor", "digits", overrides=settings, code=2)


@pytest.mark.parametrize("setting", ["model.path", "model.vae", "evaluate.clip"])
def test_a_model_without_a_folder_is_one_problem(setting: str) -> None:
    (said,) = check(load_recipe("digits", {setting: "/nonexistent"}))["problem"]
    assert said.startswith(f"{setting}: model /nonexistent: no such folder")


def test_a_store_of_a_newer_version_keeps_its_words(tmp_path: Path) -> None:
    recipe = load_recipe("digits", {"store": str(tmp_path)})
    folder = tmp_path / "registry/digits"
    folder.mkdir(parents=True)
    (folder / "history.json.1").write_bytes(encode_record({"format": FORMAT + 1, "moves": []}))
    (said,) = check(recipe)["problem"]
    assert said.endswith("was written by a newer version of kilnworks: update this one")
    assert "Failed" not in said


def test_an_absent_device_comes_with_those_that_are_there() -> None:
    (said,) = check(load_recipe("digits", {"train.device": "cuda:7"}))["problem"]
    assert said.startswith("train.device: cuda:7 is not on this machine (")
    assert ": set one of auto, cpu" in said


def test_a_warm_up_that_does_not_end_is_a_note(caplog: pytest.LogCaptureFixture) -> None:
    found = check(load_recipe("digits", {"train.steps": 6}))
    assert "train.lr_warmup_steps: 20 exceed the 6 steps" in found["note"][0]
    assert caplog.text == ""


def test_notes_are_logged_by_the_checks_of_the_run_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    recipe = load_recipe("digits", {"train.steps": 6, "store": str(tmp_path)})
    enter_before_server(recipe)
    assert caplog.text == ""
    prepare(recipe)
    assert caplog.text.count("train.lr_warmup_steps") == 1


def test_weights_of_inception_at_a_url_are_asked_for_by_the_run_alone(tmp_path: Path) -> None:
    with refusing() as host:
        weights = {"evaluate.inception": f"http://{host}/inception.pth", "store": str(tmp_path)}
        recipe = load_recipe("digits", weights)
        enter_before_server(recipe)
        with pytest.raises(Away, match=r"^evaluate\.inception: file http"):
            prepare(recipe)


def test_work_pools_without_a_server_do_not_start_one(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[object] = []
    monkeypatch.setattr("flows.run.configured_server", lambda: None)
    monkeypatch.setattr("flows.run.check_deployments", lambda *given: asked.append(given))
    found = check(load_recipe("digits", {"place.train": "gpu"}))["problem"]
    assert found[0].startswith("place: work pools need a lasting Prefect server")
    assert asked == []


def test_a_store_that_is_away_has_one_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(store: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", str(tmp_path))

    monkeypatch.setattr("artifacts.store.Store.check_writable", full)
    (said,) = check(load_recipe("digits", {"store": str(tmp_path)}))["problem"]
    assert said.startswith("store: no space left for ")
    assert said.endswith(": free some (try `kiln gc`), then run again")


def test_a_run_that_pushes_nothing_does_not_ask_the_hub_for_its_token(
    hub: HubServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    prepare(load_recipe("digits", {"store": str(tmp_path)}))
    assert [path for _, path in hub.requests if "whoami" in path] == []


def test_a_hub_that_is_away_does_not_refuse_a_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_any")
    with refusing() as host:
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", f"http://{host}")
        with pytest.raises(Away, match=r"the hub does not answer .*: run again later"):
            list(check_login(needed=True))
        (found,) = check_login(needed=False)
    assert found.level == "note" and "does not answer" in found.words


def test_a_pytorch_that_cannot_be_imported_is_a_problem_beside_another_runtime(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = {**CPU, "torch": Probe(False, reason="runtime torch cannot be imported")}
    monkeypatch.setattr("flows.doctor.probe_runtime", lambda name: broken[name])
    monkeypatch.setattr("flows.doctor._server", lambda: ("", []))
    assert not examine(load_recipe("digits"), ("digits",), as_json=False)
    assert "problem: runtime torch: runtime torch cannot" in capsys.readouterr().out
