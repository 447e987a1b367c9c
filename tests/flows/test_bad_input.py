"""Wrong input: one clear line, exit code 2, and nothing started or lost."""

import errno
import json
import os
import shutil
import signal
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import kiln_command
import pytest
from fsspec.implementations.local import LocalFileSystem
from hub_server import HubServer
from kiln_command import ROOT, environment, kiln, python
from prefect_server import Server

from artifacts.store import KeyParts, Store
from configs.errors import Refused
from configs.load_recipe import load_recipe
from configs.settings.recipe import STAGES
from flows import run as run_module
from flows import run_in_terminal
from flows.cli import main
from flows.generate import output_folder
from tasks import preflight

Here = Callable[..., str]  # of conftest.py


@pytest.fixture
def no_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """No server is configured, and none may start."""
    monkeypatch.setattr(run_in_terminal, "configured_server", lambda: None)
    monkeypatch.setattr(run_in_terminal, "start_server", pytest.fail)


def only_line(said: str) -> str:
    (line,) = said.strip().splitlines()
    assert line.startswith("kiln: ")
    return line


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["run", "digit"], "recipe digit: not found (did you mean digits?"),
        (["run", "digits", "-o", "train.stpes=3"], "did you mean train.steps?"),
        (["run", "digits", "-o", "train.steps=x"], "train.steps: it takes a whole number"),
        (["run", "digits", "-o", "train.steps"], "write it as key=value"),
        (["run", "digits", "-o", "runtime=hpu"], "runtime: Input should be 'torch'"),
        (["show", "xyz"], "xyz: no model, and no artifact's key or digest begins with it"),
        (["promote", "nobody", "v1"], "nobody v1: no such model in the registry ("),
        (["history", "digts"], "digts: there is no champion"),
        (["ls", "--store", "nowhere"], "store nowhere: not found"),
        (["gc", "--store", "foo://bar"], "foo"),
        (["gc", "--registry", "nowhere"], "registry nowhere: not found"),
        (["history", "digits", "--registry", "README.md"], "it is a file: name a folder"),
        (["generate", "x"], "generate: it has no prompt: give one, or --from-file"),
        (["generate", "x", "--from-file", "a", "-o", "file=b"], "--from-file and -o file exclude"),
    ],
)
def test_errors_found_before_anything_starts(here: Here, words: list[str], line: str) -> None:
    assert line in only_line(here(*words, code=2))


@pytest.mark.parametrize("number", [errno.EACCES, errno.EROFS])
def test_a_store_that_may_not_be_written_is_reported(
    here: Here, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """`kiln gc` asks the store for the time by writing a file."""

    def refuse(_: Any, path: str, *__: Any) -> Any:
        raise OSError(number, os.strerror(number), path)

    Store(str(tmp_path)).draft(KeyParts("train", 1, {}, {})).commit({}, {"created": ""})
    monkeypatch.setattr(LocalFileSystem, "pipe_file", refuse)
    said = only_line(here("gc", "--store", str(tmp_path), code=1))
    assert f"no permission for {tmp_path}/.probe-" in said


def test_a_server_of_prefect_that_is_gone_is_not_the_store(
    here: Here, monkeypatch: pytest.MonkeyPatch
) -> None:
    def gone(*_: Any, **__: Any) -> None:
        raise httpx.ConnectError("All connection attempts failed")

    monkeypatch.setattr("flows.run_in_terminal.run", gone)
    said = only_line(here("run", "digits", code=1))
    assert "Prefect's server does not answer (All connection attempts failed): run the same" in said


def test_a_value_that_is_no_yaml_is_not_printed(here: Here) -> None:
    said = only_line(here("run", "digits", "-o", "source.token=@secret", code=2))
    assert "override source.token: the value is not valid YAML" in said and "@secret" not in said


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["run", "digits", "--until", "evalute"], "--until: 'evalute' is unknown (did you mean ev"),
        (["run", "digits", "--until", "x"], f"'x' is unknown (there are: {', '.join(STAGES)})"),
        (
            ["run", "digits", "--until", "select"],
            "the recipe has no stage select: add a section `s",
        ),
        (["run", "digits", "--untill", "x"], "run: --untill: no such option (did you mean --until"),
        (["run", "digits", "train.steps=3"], "run: write a setting with -o: -o train.steps=3"),
        (["plan", "digits", "a=1", "b.c=2 3"], "plan: write a setting with -o: -o a=1 -o b.c=2 3"),
        (["run", "digits", "-x"], "run: -x: no such option (see kiln run -h)"),
        (["run", "digits", "--until"], "'--until' requires an argument"),
        (["run"], "run: RECIPE is missing (see kiln run -h)"),
        (["reject", "a", "v1"], "reject: --reason is missing (see kiln reject -h)"),
        (["rum", "digits"], "No such command 'rum'. Did you mean 'run'"),
        (["gc", "--days", "x"], "gc: --days: Input should be a valid number"),
        (["recipes", "-o", "name=x"], "recipes: -o needs a recipe: kiln recipes NAME"),
        (["--digits"], "--digits: no such option (see kiln -h)"),
    ],
)
def test_a_wrong_command_line_is_one_line(here: Here, words: list[str], line: str) -> None:
    assert line in only_line(here(*words, code=2))


def test_kiln_alone_prints_its_help(here: Here) -> None:
    assert "Run a recipe: download, encode" in here(code=2)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        ({"model.path": "nowhere/at/all"}, "model.path: model nowhere/at/all: no such folder"),
        ({"publish.gate": ["cmd < base"]}, "cmd is not measured (did you mean cmmd?)"),
        ({"source": {"kind": "urls", "path": "no.parquet"}}, "no.parquet"),
        ({"evaluate.clip": "./nowhere"}, "nowhere"),
        ({"encode.resolution": 33}, "33"),
        ({"beam.direct_num_worker": 2}, "did you mean beam.direct_num_workers?"),
        ({"beam.runner": "FlinkRunner"}, "store: the workers of FlinkRunner (download) cannot"),
        ({"store": "foo://bar"}, "foo"),
    ],
)
def test_errors_found_before_any_stage(
    here: Here, small: dict[str, Any], api: str, overrides: dict[str, Any], line: str
) -> None:
    said = here("run", "digits", overrides={**small, **overrides}, code=2, api=api)
    last = said.strip().splitlines()[-1]
    assert last.startswith("kiln: ")
    assert line in last
    assert not list(Path(str(small["store"])).glob("*/*"))


@pytest.mark.usefixtures("no_server")
@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        ({"store": "FILE"}, "store: no folder can be made at"),
        ({"store": "/proc/nowhere"}, "/proc"),
        ({"store": "/sys/kiln"}, "no permission"),  # root may write nothing there, either
        ({"publish.registry": "FILE"}, "publish.registry: no folder can be made at"),
        ({"publish.registry": "/sys/kiln"}, "publish.registry: no permission"),
        ({"model.path": "FILE"}, "is no valid safetensors file"),
        ({"model.path": "demo/base/unet"}, "model.path: ROOT/demo/base/unet/model_index.json is"),
        ({"model.vae": "/nowhere"}, "model.vae: model"),
        ({"evaluate.clip": "FILE"}, "evaluate.clip: model"),
        ({"evaluate.clip": "demo/base"}, "evaluate.clip: "),
        ({"source": {"kind": "urls", "path": "/no.parquet"}}, "/no.parquet"),
        ({"source": {"kind": "folder", "path": "/no"}}, "source.path: /no: no such folder"),
        ({"source": {"kind": "dataset", "path": "/nowhere"}}, "/nowhere: no such file"),
        ({"publish.gate": ["cmd < base"]}, "cmd is not measured (did you mean cmmd?)"),
        ({"publish.gate": ["fid < 20"]}, "set evaluate.inception, whose network fd_inception"),
        ({"evaluate.height": 33}, "evaluate.height: 33 is not a multiple of 8: set 32"),
        ({"evaluate.height": 64}, "evaluate.judges: digits judges pictures of 32 x 32 pixels"),
        ({"evaluate.inception": "/no.pth"}, "evaluate.inception: file /no.pth: no such file"),
        ({"evaluate.image_encoder": "demo/base"}, "evaluate.image_encoder: "),
        ({"train.device": "cuda"}, "train.device: cuda is not on this machine (cpu"),
        ({"train.device": "c"}, "train.device: c is not on this machine"),
        ({"encode.resolution": 33}, "encode.resolution: 33 is no multiple of the model's 4"),
        ({"evaluate.prompts.new": {"prompts": [], "file": "/no.txt"}}, "/no.txt"),
        ({"train.holdout_loss.every_n_steps": 2, "encode.holdout": 0}, "raise encode.holdout"),
        ({"train.method": "lora", "train.lora.target_modules": ["to_x"]}, "ends in to_x"),
    ],
)
def test_wrong_input_starts_no_server(
    here: Here, small: dict[str, Any], tmp_path: Path, overrides: dict[str, Any], line: str
) -> None:
    file = tmp_path / "file"
    file.touch()
    given = {name: str(file) if value == "FILE" else value for name, value in overrides.items()}
    own = {name: value for name, value in small.items() if name.partition(".")[0] not in given}
    said = only_line(here("run", "digits", overrides={**own, **given}, code=2))
    assert line.replace("ROOT", str(ROOT)) in said


def test_a_model_that_the_hub_lacks_starts_no_server(
    here: Here, small: dict[str, Any], hub: HubServer, no_server: None
) -> None:
    for setting in ("model.path", "model.vae", "evaluate.clip", "evaluate.image_encoder"):
        said = only_line(here("run", "digits", overrides={**small, setting: "no/model"}, code=2))
        assert f"{setting}: model no/model: no such folder, and the hub has no such model" in said
    said = only_line(here("generate", "no/model", "a cat", code=2))
    assert "model no/model: no such folder, and the hub has no such model" in said


@pytest.mark.parametrize("part", ["unet", "vae", "text_encoder", "evaluator"])
def test_weights_that_git_has_not_fetched_are_found_before_the_server(
    here: Here, small: dict[str, Any], tmp_path: Path, no_server: None, part: str
) -> None:
    base = Path(shutil.copytree("demo/base", tmp_path / "base"))
    (weights,) = (base / part).glob("*.safetensors")
    weights.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:1\nsize 1\n")
    given = {**small, "model.path": str(base), "evaluate.clip": str(base / "evaluator")}
    said = only_line(here("run", "digits", overrides=given, code=2))
    assert f"{weights} is a pointer of Git LFS, no weights: run `git lfs pull`" in said


def test_a_download_alone_needs_no_training_runtime(
    small: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(runtime: str) -> None:
        raise Refused(f"runtime {runtime} is not installed")

    monkeypatch.setattr(preflight.registry, "check_installed", missing)
    recipe = load_recipe("digits", small)
    run_module.enter_before_server(recipe, "download")
    with pytest.raises(Refused, match="is not installed"):
        run_module.enter_before_server(recipe, "encode")


def test_a_setting_without_effect_is_not_refused_before_the_server(small: dict[str, Any]) -> None:
    tf32 = {**small, "train.allow_tf32": True, "train.device": "cpu"}
    with pytest.raises(Refused, match=r"allow_tf32 needs a CUDA device, not cpu"):
        run_module.enter_before_server(load_recipe("digits", tf32))
    run_module.enter_before_server(load_recipe("digits", {**tf32, "train.mixed_precision": "bf16"}))


@pytest.mark.parametrize("path", ["s3://bucket/list.parquet", "https://a.org/list.parquet"])
def test_a_remote_source_is_not_read_before_the_server(
    small: dict[str, Any], monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    monkeypatch.setattr(preflight.download, "check", pytest.fail)
    source = {"source.kind": "urls", "source.path": path}
    own = {name: value for name, value in small.items() if not name.startswith("source.")}
    recipe = load_recipe("digits", {**own, **source})
    run_module.enter_before_server(recipe)


def test_of_a_sweep_the_trials_are_checked_before_the_server(
    small: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    checked = []
    monkeypatch.setattr(run_in_terminal, "configured_server", lambda: None)
    monkeypatch.setattr(
        run_module, "enter_before_server", lambda r, *_: checked.append(r.train.seed)
    )
    ended = {"status": "unchanged", "why": "", "metrics": {}}
    monkeypatch.setattr(run_in_terminal, "_run_flow", lambda *_, **__: ended)
    swept = {"sweep.values": {"train.seed": [1, 2]}}
    overrides = {**small, "train.seed": 5, **swept}
    run_in_terminal.run("sweep", recipe="digits", overrides=overrides, as_json=False)
    assert set(checked) == {1, 2}


def test_a_blank_reason_of_force_starts_no_server(
    here: Here, small: dict[str, Any], no_server: None
) -> None:
    said = only_line(here("run", "digits", "--force", " ", overrides=small, code=2))
    assert said.startswith("kiln: force: give a reason")


def test_a_metric_of_a_sweep_that_is_not_measured_starts_no_server(
    here: Here, small: dict[str, Any], no_server: None
) -> None:
    given = {**small, "sweep.values": {"train.seed": [1, 2]}, "sweep.metric": "cmd"}
    said = only_line(here("sweep", "digits", overrides=given, code=2))
    assert "sweep.metric: cmd is not measured (did you mean cmmd?)" in said


def test_wrong_input_of_generate_starts_no_server(
    here: Here, tmp_path: Path, no_server: None
) -> None:
    stored = ["-o", f"store={tmp_path}"]
    said = only_line(here("generate", "nosuch", "a cat", *stored, code=2))
    assert "model nosuch: it is neither a folder nor a champion in" in said
    (tmp_path / "registry/digits/v1").mkdir(parents=True)
    said = only_line(here("generate", "digit", "a cat", *stored, code=2))
    assert said.endswith(f"nor a champion in {tmp_path}/registry (did you mean digits?)")
    assert "no such folder" in only_line(here("generate", "/no/model", "a cat", code=2))
    said = only_line(here("generate", "demo/base", "--from-file", "/no.txt", code=2))
    assert said == "kiln: --from-file: /no.txt: no such file or folder"
    said = only_line(here("generate", "demo/base", "--from-file", "demo", code=2))
    assert said.startswith("kiln: --from-file: demo: cannot be read: ") and "Is a directory" in said
    for setting, words in (("height=33", "height: 33 is not"), ("device=cuda", "device: cuda is")):
        assert words in only_line(here("generate", "demo/base", "a cat", "-o", setting, code=2))
    said = only_line(here("generate", "demo/base", "a cat", "--out", "s3://a/b", code=2))
    assert "out: s3://a/b is a URL" in said


def test_a_check_of_the_output_folder_leaves_no_folder(tmp_path: Path) -> None:
    assert output_folder(str(tmp_path / "new/deep")) == tmp_path / "new/deep"
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to(tmp_path / "missing")
    wrong = [tmp_path / name for name in ("file/deep", "file", "link", "link/deep")]
    for folder in (*wrong, Path("/proc/deep")):
        with pytest.raises(Refused, match=f"^out: {folder} is not writable: "):
            output_folder(str(folder))


def test_an_error_before_the_server_is_json_too(
    small: dict[str, Any], no_server: None, capsys: pytest.CaptureFixture[str]
) -> None:
    overrides = {**small, "store": "/proc/nowhere"}
    with pytest.raises(Refused) as error:
        run_in_terminal.run("finetune", recipe="digits", overrides=overrides, as_json=True)
    assert json.loads(capsys.readouterr().out) == {"status": "failed", "error": str(error.value)}


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["run", "nosuch"], "recipe nosuch: not found"),
        (["run", "digits", "-o", "train.steps=0"], "train.steps: "),
        (["run", "digits", "-o", "train.steps"], "write it as key=value"),
        (["retrain", "nosuch"], "recipe nosuch: not found"),
        (["sweep", "nosuch"], "recipe nosuch: not found"),
        (["generate", "x", "a cat", "-o", "sed=7"], "seed"),
    ],
)
@pytest.mark.usefixtures("at_home", "no_server")
def test_wrong_input_is_json_too(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: list[str], why: str
) -> None:
    monkeypatch.setattr("sys.argv", ["kiln", *words, "--json"])
    with pytest.raises(SystemExit, match="2"):
        main()
    said = capsys.readouterr()
    told = json.loads(said.out)
    assert told["status"] == "failed" and why in told["error"]
    assert only_line(said.err) == f"kiln: {told['error']}"


@pytest.mark.slow
def test_a_wrong_deployment_fails_before_any_stage(
    at_home: Callable[..., None], small: dict[str, Any], tmp_path: Path, api: str
) -> None:
    at_home(api)
    from flows.finetune import finetune

    state: Any = finetune("digits", {**small, "train.stepz": 3}, return_state=True)
    run, server = state.state_details.flow_run_id, Server(tmp_path, api)
    known = server.ask(f"/flow_runs/{run}")["state"]
    assert known["name"] == "Failed"
    why = "override train.stepz: unknown setting (did you mean train.steps?)"
    assert known["message"] == f"Flow run encountered an exception: Refused: {why}"
    assert server.ask("/task_runs/filter", {"flow_runs": {"id": {"any_": [str(run)]}}}) == []


@pytest.mark.slow
def test_a_port_in_use_is_reported(here: Here, small: dict[str, Any], api: str) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        said = here("run", "digits", overrides={**small, "source.port": port}, code=2, api=api)
    assert f"{port}" in said.strip().splitlines()[-1]


@pytest.mark.slow
def test_a_wrong_setting_of_prefect_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    named = {**kiln_command.environment(tmp_path), "PREFECT_CLIENT_MAX_RETRIES": "many"}
    monkeypatch.setattr(kiln_command, "environment", lambda *_: named)
    for command in ("run", "doctor", "place"):
        said = kiln(tmp_path, command, "digits", code=2).splitlines()[-1]  # Prefect writes, too
        assert said.startswith("kiln: PREFECT_CLIENT_MAX_RETRIES: Input should be a valid integer")


@pytest.mark.slow
def test_the_error_of_the_command_is_one_line(
    tmp_path: Path, small: dict[str, Any], api: str
) -> None:
    assert "did you mean digits?" in only_line(kiln(tmp_path, "run", "digit", code=2))
    wrong = {**small, "model.path": "nowhere/at/all"}
    said = kiln(tmp_path, "run", "digits", overrides=wrong, code=2, api=api)
    assert "no such folder" in only_line(said)
    said = kiln(tmp_path, "generate", "nosuch", "a cat", code=2, api=api)
    assert "model nosuch: it is neither a folder nor a champion in" in only_line(said)


def test_a_terminated_command_says_how_to_resume(tmp_path: Path) -> None:
    """As Ctrl-C does; the process ends by the signal."""
    code = (
        "import os, signal; from flows import cli; cli.app = lambda **_: os.kill(os.getpid(), 15)"
    )
    done = python("-c", f"{code}; cli.main()", env=environment(tmp_path))
    assert done.returncode == -signal.SIGTERM
    assert only_line(done.stderr) == "kiln: interrupted; run the same command to resume"
