"""Scripts and Dockerfiles of deploy/: syntax, names of files and targets, and executed commands."""

import inspect
import json
import os
import re
import runpy
import shutil
import signal
import subprocess
import sys
import threading
import time
import tomllib
from collections.abc import Callable
from functools import partial
from http.server import BaseHTTPRequestHandler, HTTPServer
from importlib.metadata import entry_points
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock
from uuid import UUID

import pytest
import yaml
from kiln_command import ROOT
from prefect.events.schemas.automations import AutomationCore
from prefect.settings import Settings

from configs.load_and_extend_recipe import load_recipe
from flows.generate import generate
from flows.model_events import PUBLISHED, REJECTED
from runtimes.process.collectives import free_port
from tasks.evaluate.inception import ENVIRONMENT
from tasks.retrain.watch_source import EVENT, source_resource

PATIENCE = 60  # seconds, for a machine that does much else
DEPLOY = ROOT / "deploy"
SCRIPTS = sorted(str(path.relative_to(DEPLOY)) for path in DEPLOY.glob("**/*.sh"))
DOCKERFILES = sorted(str(path.relative_to(DEPLOY)) for path in DEPLOY.glob("**/Dockerfile"))
INSTRUCTIONS = {
    *("ARG", "FROM", "WORKDIR", "COPY", "RUN", "ENV", "USER", "HEALTHCHECK", "ENTRYPOINT", "CMD")
}
#: Prints environment variables and arguments, one per line.
PRINT_ARGUMENTS = """#!/bin/sh
echo "PYTHONPATH=$PYTHONPATH"
echo "PT_HPU_LAZY_MODE=$PT_HPU_LAZY_MODE"
for word in "$@"; do echo "$word"; done
"""


def parses(shell: str) -> bool:
    return subprocess.run(["bash", "-n"], input=shell.encode(), capture_output=True).returncode == 0


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A checkout with only the scripts."""
    for name in SCRIPTS:
        path = tmp_path / "checkout/deploy" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes((DEPLOY / name).read_bytes())
        path.chmod(0o755)
    (tmp_path / "job.json").write_text("{}")
    return tmp_path / "checkout"


def run(script: Path, *words: str, programs: Path) -> list[str]:
    """Run a script from another folder; the lines of its output."""
    done = subprocess.run(
        [script, *words],
        env={"PATH": f"{programs}:{os.environ['PATH']}"},
        cwd=script.parents[3],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def write_program(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)


@pytest.mark.parametrize("name", SCRIPTS)
def test_script_parses_is_executable_and_stops_at_an_error(name: str) -> None:
    text = (DEPLOY / name).read_text(encoding="utf-8")
    assert text.startswith("#!/usr/bin/env bash\n")
    assert parses(text)
    assert "\nset -euo pipefail\n" in text
    assert os.access(DEPLOY / name, os.X_OK)


def test_gaudi_launcher_starts_torchrun(checkout: Path) -> None:
    write_program(checkout / "bin/torchrun", PRINT_ARGUMENTS)
    script = checkout / "deploy/gaudi/launch.sh"
    words = run(script, "job.json", "2", "8", "10.0.0.1", "1", programs=checkout / "bin")
    assert words == [
        f"PYTHONPATH={checkout}",
        "PT_HPU_LAZY_MODE=0",
        "--nnodes=2",
        "--nproc_per_node=8",
        "--node_rank=1",
        "--master_addr=10.0.0.1",
        "--master_port=12345",
        "--no-python",
        *("python3", "-P", "-m", "runtimes", str(checkout.parent / "job.json")),
    ]


def test_ascend_launcher_starts_msrun_of_the_environment(
    checkout: Path,
) -> None:
    write_program(checkout / ".venv-mindspore/bin/msrun", PRINT_ARGUMENTS)
    script = checkout / "deploy/ascend/launch.sh"
    words = run(script, "job.json", "16", "8", "10.0.0.1", "1", programs=checkout / "none")
    logs = "--log_dir=outputs/logs/job"  # in a folder that an image's user owns
    assert words[2:] == [
        "--worker_num=16",
        "--local_worker_num=8",
        "--node_rank=1",
        "--master_addr=10.0.0.1",
        "--master_port=8118",
        "--cluster_time_out=600",
        logs,
        "--join=True",
        *("python", "-P", "-m", "runtimes", str(checkout.parent / "job.json")),
    ]
    assert f"/kiln/{logs.partition('=')[2].partition('/')[0]}" in owned("ascend/Dockerfile")


def torchrun_pod(folder: Path, rank: str) -> subprocess.Popen[bytes]:
    """The container's command of torchrun.yaml for one node, whose one rank is a shell script."""
    text = (DEPLOY / "kubernetes/torchrun.yaml").read_text(encoding="utf-8")
    text = text.replace("29500", str(free_port()))
    (job,) = (one for one in yaml.safe_load_all(text) if one["kind"] == "Job")
    (container,) = job["spec"]["template"]["spec"]["containers"]
    write_program(folder / "bin/python", f"#!/bin/bash\n{rank}\n")
    programs = [folder / "bin", Path(sys.executable).parent, os.environ["PATH"]]
    env = dict.fromkeys(("NODES", "GPUS"), "1") | {"MASTER": "127.0.0.1", "JOB": "job.json"}
    env |= {"JOB_COMPLETION_INDEX": "0", "PATH": ":".join(map(str, programs))}
    words = [*container["command"], *container["args"]]
    return subprocess.Popen(words, cwd=folder, env=env | {"TMPDIR": str(folder)})


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rank", "code"),
    [
        pytest.param("exit 0", 0, marks=pytest.mark.extended),
        ("exit 2", 2),
        pytest.param("exit 7", 1, marks=pytest.mark.extended),
    ],
)
def test_a_pod_of_torchrun_reports_wrong_input(tmp_path: Path, rank: str, code: int) -> None:
    assert torchrun_pod(tmp_path, rank).wait() == code


def stopped(program: subprocess.Popen[Any], folder: Path) -> int:
    """The exit code of a program that gets SIGTERM once its training has started."""
    until = time.monotonic() + PATIENCE
    while not (folder / "started").exists():
        assert program.poll() is None and time.monotonic() < until
        time.sleep(0.05)
    program.terminate()
    return program.wait(PATIENCE)


@pytest.mark.slow
def test_a_pod_of_torchrun_ends_after_the_checkpoint_of_a_stop(tmp_path: Path) -> None:
    save = "trap 'sleep 1; touch saved; exit 143' TERM"
    pod = torchrun_pod(tmp_path, f"{save}\ntouch started\nwhile :; do sleep 0.1; done")
    assert stopped(pod, tmp_path) == 1
    assert (tmp_path / "saved").exists()


#: Stands in for Prefect, whose worker ends itself by SIGINT on SIGTERM: a shell must not ignore it.
#: Its end is that of the training's standard input.
PREFECT = f"""#!{sys.executable}
import signal, subprocess, sys
heard = signal.getsignal(signal.SIGINT) is signal.default_int_handler
signal.signal(signal.SIGTERM, lambda *_: sys.exit(7 if heard else "SIGINT is ignored"))
train = ["python", "-P", "-m", "runtimes", "job.json"]
subprocess.Popen(train, stdin=subprocess.PIPE, start_new_session=True).wait()
"""
#: Stands in for a training: at the end of its input it writes a checkpoint; a signal would end it.
TRAINING = "#!/bin/bash\ntouch started\ncat >/dev/null\nsleep 2\ntouch saved\n"
WAIT = "deploy/wait_for_checkpoints.sh"


@pytest.mark.slow
def test_a_stopped_worker_ends_after_the_checkpoint_of_its_training(tmp_path: Path) -> None:
    write_program(tmp_path / "bin/prefect", PREFECT)
    write_program(tmp_path / "bin/python", TRAINING)
    env = {**os.environ, "PATH": f"{tmp_path}/bin:{os.environ['PATH']}"}
    command = ["bash", ROOT / WAIT, "prefect", "worker", "start"]
    heard = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)  # as a container starts
    worker = subprocess.Popen(command, cwd=tmp_path, env=env, preexec_fn=heard)
    assert stopped(worker, tmp_path) == 7
    assert (tmp_path / "saved").exists()


def test_every_worker_and_every_pod_waits_for_checkpoints() -> None:
    compose = yaml.safe_load((DEPLOY / "server/compose.yaml").read_text(encoding="utf-8"))
    services = [one.get("entrypoint", []) for one in compose["services"].values()]
    assert [one[0] for one in services if "prefect" in one] == [WAIT]
    unit = (DEPLOY / "systemd/kiln-worker@.service").read_text(encoding="utf-8")
    (start,) = re.findall(r"^ExecStart=(\S+)", unit, re.MULTILINE)
    assert start == f"/srv/kiln/kiln/{WAIT}" and "\nKillMode=mixed\n" in unit
    for path in (DEPLOY / "kubernetes").glob("*_job_template.json"):
        manifest = json.loads(path.read_text(encoding="utf-8"))["job_configuration"]["job_manifest"]
        (pod,) = manifest["spec"]["template"]["spec"]["containers"]
        assert pod["command"] == [f"/kiln/{WAIT}"], path.name


def docker_runs() -> list[list[str]]:
    """Words of each `docker run` in the pages."""
    pages = [ROOT / "README.md", *DEPLOY.glob("**/*.md"), *(ROOT / "docs").glob("*.md")]
    text = "\n".join(page.read_text(encoding="utf-8") for page in pages).replace("\\\n", " ")
    return [line.split() for line in re.findall(r"docker run ([^`\n]+)", text)]


def test_a_container_of_the_pages_keeps_its_caches_and_has_time_for_a_checkpoint() -> None:
    runs = [words for words in docker_runs() if "doctor" not in words]
    assert runs
    grace = load_recipe("digits").train.grace_seconds
    for words in runs:
        assert "kiln-cache:/cache" in words, words
        assert float(words[words.index("--stop-timeout") + 1]) > grace, words
        if "--detach" in words:
            assert words[words.index("--restart") + 1] == "unless-stopped", words
            assert WAIT in words, words
        else:
            assert "kiln:/kiln/store" in words, words


@pytest.mark.parametrize("words", [["xla"], ["jax"], []])
def test_tpu_setup_leaves_to_make_what_is_old(checkout: Path, words: list[str]) -> None:
    (checkout / ".venv-xla").mkdir()
    (checkout / ".venv-xla/tpu").touch()  # an earlier release's
    write_program(checkout / "bin/make", '#!/bin/sh\necho make "$@"\n')
    write_program(checkout / "bin/python3.11", "#!/bin/sh\n")  # has ensurepip
    commands = run(checkout / "deploy/tpu/setup.sh", *words, programs=checkout / "bin")
    (runtime,) = words or ["xla"]
    assert commands == [f"make setup-{runtime}-tpu PYTHON=python3.11"]


@pytest.mark.parametrize(("changed", "code"), [(None, 0), ("xla", 1), ("xla-tpu", 1), ("torch", 0)])
def test_make_renews_the_environment_of_a_tpu_if_its_lists_change(
    tmp_path: Path, changed: str | None, code: int
) -> None:
    for name in ("Makefile", "pyproject.toml", "requirements"):
        (tmp_path / name).symlink_to(ROOT / name)
    stamps = [".venv-uv/stamp", ".venv-xla/list.stamp", ".venv-xla/stamp", ".venv-xla/tpu.stamp"]
    for stamp in stamps:
        (tmp_path / stamp).parent.mkdir(exist_ok=True)
        (tmp_path / stamp).touch()
    new = [] if changed is None else [f"--what-if=requirements/{changed}.txt"]
    query = ["make", "--question", *new, stamps[-1]]
    assert subprocess.run(query, cwd=tmp_path, capture_output=True).returncode == code


def test_libtpu_of_runtime_jax_is_that_of_the_plans() -> None:
    (libtpu,) = (ROOT / "requirements/jax-tpu.txt").read_text(encoding="utf-8").split()
    assert libtpu == (ROOT / "requirements/plan.txt").read_text(encoding="utf-8").strip()


def instructions(name: str) -> list[tuple[str, str]]:
    """Keyword and arguments of each instruction of a Dockerfile."""
    text = (DEPLOY / name).read_text(encoding="utf-8").replace("\\\n", " ")
    lines = [line.strip() for line in text.splitlines()]
    split = (line.partition(" ") for line in lines if line and not line.startswith("#"))
    return [(keyword, rest.strip()) for keyword, _, rest in split]


@pytest.mark.parametrize("name", DOCKERFILES)
def test_dockerfile_names_existing_files_and_targets(name: str) -> None:
    found = instructions(name)
    keywords = [keyword for keyword, _ in found]
    assert set(keywords) <= INSTRUCTIONS
    base = len(keywords) - 1 - keywords[::-1].index("FROM")  # earlier ones are only copied from
    assert set(keywords[:base]) <= {"ARG", "FROM"}
    given = (rest for keyword, rest in found[:base] if keyword == "ARG")
    arguments = dict(rest.split("=", 1) for rest in given)
    assert set(re.findall(r"\$\{(\w+)\}", found[base][1])) == arguments.keys()
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    known = set(re.findall(r"^\.PHONY: (.*)$", makefile, re.MULTILINE)[0].split())
    for keyword, rest in found:
        if keyword == "RUN":
            assert parses(rest)
            assert all((ROOT / path).is_file() for path in re.findall(r"requirements/\S+", rest))
            for targets in re.findall(r"\bmake ([^&|;]*)", rest):
                names = [word for word in targets.split() if "=" not in word]
                assert set(names) <= known
        elif keyword in ("ENTRYPOINT", "CMD"):
            words = json.loads(rest)
            assert words and all(isinstance(word, str) for word in words)
            if words[:2] == ["bash", "-c"]:
                assert parses(words[2])
        elif keyword == "COPY" and "--from" not in rest:
            assert all((ROOT / source).exists() for source in rest.split()[:-1])
        elif keyword == "HEALTHCHECK":
            (_, script) = json.loads(rest.partition("CMD ")[2])
            assert (ROOT / script).is_file()
        elif keyword == "ENV":
            assert all(re.fullmatch(r"\w+=\S+", word) for word in rest.split())


@pytest.mark.parametrize("name", DOCKERFILES)
def test_image_is_pinned_does_not_run_as_root_and_has_a_health_check(name: str) -> None:
    found = instructions(name)
    keywords = [keyword for keyword, _ in found]
    user = found[keywords.index("USER")][1]
    assert re.fullmatch(r"10001(:1000)?", user)
    assert "RUN" not in keywords[keywords.index("USER") :]
    assert f"--uid {user.partition(':')[0]} " in str(found)
    assert keywords.count("HEALTHCHECK") == 1
    bases = [rest.split()[0] for keyword, rest in found if keyword == "FROM"]
    assert all(re.search(r"[}\d]", base) and ":" in base for base in bases)
    versions = [rest.partition("=")[2] for keyword, rest in found if keyword == "ARG"]
    assert all(re.search(r"\d+\.\d+", version) for version in versions)


def owned(name: str) -> set[str]:
    """Folders of an image that belong to its user."""
    (setup,) = (rest for keyword, rest in instructions(name) if "install --directory" in rest)
    return set(setup.rpartition("install --directory --owner=kiln ")[2].split())


@pytest.mark.parametrize("name", DOCKERFILES)
def test_user_of_an_image_owns_its_caches_and_the_default_folders_of_runs(name: str) -> None:
    found = instructions(name)
    (folder,) = (rest for keyword, rest in found if keyword == "WORKDIR")
    (settings,) = (rest for keyword, rest in found if keyword == "ENV")
    environment = dict(word.split("=", 1) for word in settings.split())
    out = inspect.signature(generate.fn).parameters["out"].default
    used = {f"{folder}/{load_recipe('digits').store}", f"{folder}/{out}", environment["KILN_CACHE"]}
    assert used == owned(name)
    assert Path(environment["HF_HOME"]).parent == Path(environment["KILN_CACHE"])


def test_servers_ask_no_analytics_host(monkeypatch: pytest.MonkeyPatch) -> None:
    off = {"PREFECT_SERVER_ANALYTICS_ENABLED": "false", "PREFECT_SERVER_UI_V2_ENABLED": "false"}
    compose = yaml.safe_load((DEPLOY / "server/compose.yaml").read_text(encoding="utf-8"))
    assert off.items() <= compose["services"]["server"]["environment"].items()
    text = (DEPLOY / "kubernetes/server.values.yaml").read_text(encoding="utf-8")
    named = yaml.safe_load(text)["global"]["prefect"]["env"]
    assert off.items() <= {one["name"]: one["value"] for one in named}.items()
    for name, value in off.items():
        monkeypatch.setenv(name, value)
    server = Settings().server
    assert not server.analytics_enabled and not server.ui.v2_enabled


@pytest.mark.parametrize("name", ["cuda", "gaudi", "workers"])
def test_image_that_evaluates_has_torch_fidelity_where_it_is_looked_for(name: str) -> None:
    (found,) = re.findall(
        r"pip install --no-cache-dir --no-deps --requirement requirements/fidelity\.txt\s+"
        r'--target "(\$\(python3? -c .*?\))"(?:\s|$)',
        "\n".join(rest for keyword, rest in instructions(f"{name}/Dockerfile") if keyword == "RUN"),
    )
    command = re.sub(r"\(python3? ", f"({sys.executable} ", found)
    folder = subprocess.check_output(["sh", "-c", f'printf %s "{command}"'], text=True)
    assert folder == sys.prefix + ENVIRONMENT


def test_image_for_nvidia_gpus_has_the_optimizer_that_plans_advise() -> None:
    """`adamw_8bit` is of bitsandbytes, in cuda.txt; an image has no `make setup-cuda`."""
    runs = [rest for keyword, rest in instructions("cuda/Dockerfile") if keyword == "RUN"]
    assert re.search(r"pip install [^&]*--no-deps [^&]*requirements/cuda\.txt", "\n".join(runs))


def test_worker_image_has_the_harness_of_the_pinned_beam() -> None:
    (beam,) = re.findall(
        r"apache/beam_python3\.11_sdk:(\S+) AS", str(instructions("workers/Dockerfile"))
    )
    pinned = (ROOT / "requirements/base.txt").read_text(encoding="utf-8").splitlines()
    assert f"apache-beam=={beam}" in pinned


def test_beam_harness_makes_no_environment_where_only_root_may_write() -> None:
    settings = dict(instructions("workers/Dockerfile"))["ENV"].split()
    assert "RUN_PYTHON_SDK_IN_DEFAULT_ENVIRONMENT=1" in settings


def checks_of_loopback() -> list[str]:
    """The programs of health checks that ask a server of their container."""
    compose = yaml.safe_load((DEPLOY / "server/compose.yaml").read_text(encoding="utf-8"))
    tests = [one.get("healthcheck", {}).get("test", []) for one in compose["services"].values()]
    found = [words[-1] for words in tests if "python" in words]
    worker = (DEPLOY / "worker_health.py").read_text(encoding="utf-8")
    return [*found, worker.replace("/proc/1/cmdline", "/proc/self/cmdline")]


@pytest.mark.parametrize("program", checks_of_loopback(), ids=["server", "worker", "image"])
def test_a_health_check_asks_no_proxy(program: str) -> None:
    class Health(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            return

    server = HTTPServer(("127.0.0.1", 0), Health)
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    program = re.sub(r"127\.0\.0\.1:\d+", f"127.0.0.1:{server.server_port}", program)
    proxy = {"http_proxy": "http://127.0.0.1:9"}
    command = [sys.executable, "-c", program, "--with-healthcheck"]
    done = subprocess.run(command, env=os.environ | proxy, capture_output=True, text=True)
    server.shutdown()
    server.server_close()
    assert done.returncode == 0, done.stderr


def test_health_check_fails_only_if_a_worker_does_not_answer() -> None:
    """This container's first program is none, so its health is that it runs."""
    script = DEPLOY / "worker_health.py"
    assert subprocess.run([sys.executable, script]).returncode == 0
    worker = script.read_text().replace("/proc/1/cmdline", "/proc/self/cmdline")
    command = [sys.executable, "-", "--with-healthcheck"]
    done = subprocess.run(
        command, input=worker.replace("8080", "9"), capture_output=True, text=True
    )
    assert done.returncode == 1 and "does not poll" in done.stderr


def dask_commands() -> list[list[str]]:
    """Arguments of `dask` in the compose file and in the page on engines."""
    compose = yaml.safe_load((DEPLOY / "workers/compose.yaml").read_text(encoding="utf-8"))
    services = compose["services"].values()
    commands = [one["entrypoint"] + one.get("command", []) for one in services]
    page = (ROOT / "docs/scale.md").read_text(encoding="utf-8")
    commands += [line.split() for line in re.findall(r"^\.venv/bin/(dask .*)$", page, re.MULTILINE)]
    return [words[1:] for words in commands]


@pytest.mark.parametrize("words", dask_commands(), ids=" ".join)
def test_dask_command_is_one_of_dask(words: list[str]) -> None:
    (entry,) = entry_points(group="dask_cli", name=words[0])
    context = entry.load().make_context(words[0], words[1:])
    assert words[0] == "scheduler" or context.params["preload"] == ("tasks.beam_pipeline",)


def test_compose_file_builds_the_worker_image() -> None:
    file = DEPLOY / "workers/compose.yaml"
    compose = yaml.safe_load(file.read_text(encoding="utf-8"))
    for service in compose["services"].values():
        root = (file.parent / service["build"]["context"]).resolve()
        assert (root, root / service["build"]["dockerfile"]) == (ROOT, file.parent / "Dockerfile")
        assert all(port.startswith("127.0.0.1:") for port in service.get("ports", []))
        for entry in service.get("env_file", []):
            assert (file.parent / entry["path"]).resolve() == ROOT / ".env"


def test_an_event_of_a_source_starts_the_retraining_of_its_model() -> None:
    listed = yaml.safe_load((DEPLOY / "prefect.yaml").read_text(encoding="utf-8"))["deployments"]
    by_flow: dict[str, list[dict[str, Any]]] = {}
    for entry in listed:
        by_flow.setdefault(entry["entrypoint"].partition(":")[2], []).append(entry)
    watched = {entry["parameters"]["recipe"] for entry in by_flow["watch_source"]}
    assert watched == {entry["parameters"]["recipe"] for entry in by_flow["retrain"]}
    for entry in by_flow["retrain"]:
        (trigger,) = entry["triggers"]
        name = load_recipe(entry["parameters"]["recipe"]).publish.name
        assert trigger["match"] == {"prefect.resource.id": source_resource(name)}
        assert trigger["expect"] == [EVENT]
        assert entry["concurrency_limit"] == {"limit": 1, "collision_strategy": "CANCEL_NEW"}


def in_build_context(path: str) -> bool:
    """Whether Docker copies a file of the checkout: the last matching pattern decides."""
    copied = True
    for line in (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines():
        pattern = re.escape(line.removeprefix("!"))
        pattern = pattern.replace(r"\*\*/", "(.*/)?").replace(r"\*", "[^/]*")
        if re.fullmatch(f"{pattern}(/.*)?", path):
            copied = line.startswith("!")
    return copied


def test_images_have_the_code_and_nothing_that_a_host_made() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    packages = project["tool"]["setuptools"]["packages"]["find"]["include"]
    needed = [f"{package.rstrip('*')}/a/b.py" for package in packages]
    needed += ["Makefile", "pyproject.toml", "README.md", "requirements/base.txt"]
    assert all(in_build_context(path) for path in [*needed, "deploy/server/set_up.sh"])
    made = [".git/config", ".venv-xla/bin/python", "flows/__pycache__/a.pyc", "store/a", "build/a"]
    made += ["outputs/a.png", "pictures/a.png", "mine.yaml"]
    assert not [path for path in [*made, "tests/a.py", "docs/a.md"] if in_build_context(path)]


@pytest.mark.parametrize(
    "path",
    [".env", "deploy/server/.env", "worker.env", "deploy/worker.env", "prefect.dump", "mine.pem"],
)
def test_a_file_with_secrets_is_in_no_image_and_no_commit(path: str, tmp_path: Path) -> None:
    """Commands of the pages create these files."""
    assert not in_build_context(path)
    subprocess.run(["git", "init", "--quiet", tmp_path], check=True)
    shutil.copy(ROOT / ".gitignore", tmp_path)
    subprocess.run(["git", "check-ignore", "--quiet", path], cwd=tmp_path, check=True)


def test_every_deployment_has_a_pool_that_the_pages_create() -> None:
    listed = yaml.safe_load((DEPLOY / "prefect.yaml").read_text(encoding="utf-8"))["deployments"]
    used = {entry["work_pool"]["name"] for entry in listed}
    for file in ("docs/orchestration.md", "deploy/server/set_up.sh", "deploy/prefect.yaml"):
        (pools,) = re.findall(r"for pool in ([\w ]+);", (ROOT / file).read_text(encoding="utf-8"))
        assert set(pools.split()) == used, file
    anyone = {e["name"]: e["work_pool"]["name"] for e in listed if e["name"] in used}
    assert anyone == {pool: pool for pool in used}


def test_a_run_on_kubernetes_has_a_store_beyond_its_pod_and_a_process_per_gpu() -> None:
    page = (DEPLOY / "kubernetes/README.md").read_text(encoding="utf-8")
    lines = [line for line in page.splitlines() if "--job-variable gpus=" in line]
    for line in lines:
        overrides = json.loads(re.findall(r"overrides='(.*?)'", line)[0])
        assert "://" in overrides["store"]
        assert [str(overrides["train.processes"])] == re.findall(r"gpus=(\d+)", line)
    assert lines and "AWS_SECRET_ACCESS_KEY" in page


@pytest.mark.parametrize("enabled", [True, False, None])
def test_an_automation_without_notification_needs_no_block_and_stays_as_it_is(
    enabled: bool | None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    get_client = MagicMock()
    monkeypatch.setattr("prefect.client.orchestration.get_client", get_client)
    client = get_client.return_value.__enter__.return_value
    same = [] if enabled is None else [SimpleNamespace(id="known", enabled=enabled)]
    client.read_automations_by_name.return_value = same
    main = runpy.run_path(str(DEPLOY / "automations/apply.py"))["main"]
    assert main([str(DEPLOY / "automations/run-without-heartbeat.yaml")]) == 0
    if enabled is None:
        (made,) = client.create_automation.call_args.args
    else:
        (name, made) = client.update_automation.call_args.args
        assert (name, made.enabled) == ("known", enabled)
    assert made.name == "kiln: run without heartbeat"
    assert main([str(DEPLOY / "automations/run-late.yaml")]) == 2
    assert main(["a-block-without-name"]) == 2
    assert "usage" in capsys.readouterr().err


@pytest.fixture
def set_up(tmp_path: Path) -> Callable[..., list[str]]:
    """Runs set_up.sh; the commands of prefect and python that it gives. No pool exists yet."""
    write_program(
        tmp_path / "prefect",
        '#!/bin/sh\ncase "$*" in *inspect*) exit 1; esac\necho prefect "$@"\n',
    )
    write_program(tmp_path / "python", '#!/bin/sh\necho python "$@"\n')
    return partial(run, DEPLOY / "server/set_up.sh", programs=tmp_path)


def test_set_up_makes_bucket_pools_deployments_and_the_end_of_lost_runs(
    set_up: Callable[..., list[str]],
) -> None:
    pools = ("cpu", "gpu", "tpu", "ascend", "gaudi")
    assert set_up("s3://kiln") == [
        "python - s3://kiln",
        *(f"prefect --no-prompt work-pool create {pool} --type process" for pool in pools),
        "prefect --no-prompt deploy --all --prefect-file deploy/prefect.yaml",
        "python deploy/automations/apply.py deploy/automations/run-without-heartbeat.yaml",
    ]


def test_pools_of_a_cluster_start_jobs_where_there_is_a_template(
    set_up: Callable[..., list[str]],
) -> None:
    made = [line.partition("create ")[2] for line in set_up("s3://kiln", "kubernetes")]
    template = "--type kubernetes --base-job-template deploy/kubernetes/{0}_job_template.json"
    kubernetes = [f"{pool} {template.format(pool)}" for pool in ("cpu", "gpu")]
    process = [f"{pool} --type process" for pool in ("tpu", "ascend", "gaudi")]
    assert [line for line in made if line] == [*kubernetes, *process]


def test_the_backup_of_the_bucket_has_its_address_and_a_restore() -> None:
    page = (DEPLOY / "server/README.md").read_text(encoding="utf-8")
    backup, restore = (page.partition(f"\n## {part}\n")[2] for part in ("Backup", "Restore"))
    (copy,) = re.findall(r"^aws s3 sync (s3://\S+) (/\S+)", backup.partition("\n## ")[0], re.M)
    before = backup.partition("aws s3 sync")[0]
    variables = ("AWS_ENDPOINT_URL=", "AWS_ACCESS_KEY_ID=", "AWS_SECRET_ACCESS_KEY=")
    assert all(name in before for name in variables)
    back = restore.partition(f"\naws s3 sync {copy[1]} {copy[0]}")[2].partition("\n## ")[0]
    assert "kiln verify" in back and f"--store {copy[0]}/" in back


def test_automations_react_to_events_that_flows_emit() -> None:
    emitted = {PUBLISHED, REJECTED}
    expected = set()
    for path in (DEPLOY / "automations").glob("*.yaml"):
        text = path.read_text(encoding="utf-8").replace("${BLOCK}", str(UUID(int=0)))
        automation = AutomationCore.model_validate(yaml.safe_load(text))
        expected |= {name for name in automation.trigger.expect if name.startswith("kiln.")}
    assert expected == emitted


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="no systemd here")
def test_systemd_accepts_the_unit(tmp_path: Path) -> None:
    unit = (DEPLOY / "systemd/kiln-worker@.service").read_text(encoding="utf-8")
    unit = re.sub(r"^ExecStart=\S+", f"ExecStart={sys.executable}", unit, flags=re.MULTILINE)
    path = tmp_path / "kiln-worker@ascend.service"
    path.write_text(re.sub("^User=.*", "User=root", unit, flags=re.MULTILINE))
    drop_in = tmp_path / f"{path.name}.d/cann.conf"
    drop_in.parent.mkdir()
    for more in ("", ascend_drop_in()):
        drop_in.write_text(more)
        done = subprocess.run(["systemd-analyze", "verify", path], capture_output=True, text=True)
        about = [line for line in done.stderr.splitlines() if "kiln-worker" in line]
        assert about == []


def ascend_drop_in() -> str:
    text = (DEPLOY / "ascend/README.md").read_text(encoding="utf-8")
    (found,) = re.findall(r"^```\n(\[Service\]\n.*?)^```", text, re.MULTILINE | re.DOTALL)
    return str(found)


def test_a_worker_of_an_ascend_machine_has_the_environment_of_cann() -> None:
    entry = dict(instructions("ascend/Dockerfile"))["ENTRYPOINT"]
    (source,) = re.findall(r"source \S+ && exec ", entry)
    _, reset, start = ascend_drop_in().splitlines()
    words = f"{WAIT} .venv/bin/prefect worker start --pool ascend"
    assert (reset, start) == ("ExecStart=", f"ExecStart=/bin/bash -c '{source}{words}'")
