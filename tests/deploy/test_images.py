"""Images: Dockerfiles name what there is, and what an image holds, owns and reports."""

import inspect
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from http.server import BaseHTTPRequestHandler
from importlib.metadata import entry_points
from pathlib import Path

import pytest
import yaml
from deploy_files import DEPLOY, instructions, owned, parses
from kiln_command import ROOT
from loopback_server import LoopbackServer

from configs.load_recipe import load_recipe
from flows.generate import generate
from tasks.evaluate.inception import ENVIRONMENT

DOCKERFILES = sorted(str(path.relative_to(DEPLOY)) for path in DEPLOY.glob("**/Dockerfile"))
INSTRUCTIONS = {
    *("ARG", "FROM", "WORKDIR", "COPY", "RUN", "ENV", "USER", "HEALTHCHECK", "ENTRYPOINT", "CMD")
}


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

    with LoopbackServer(Health) as server:
        program = re.sub(r"127\.0\.0\.1:\d+", server.host, program)
        proxy = {"http_proxy": "http://127.0.0.1:9"}
        command = [sys.executable, "-c", program, "--with-healthcheck"]
        done = subprocess.run(command, env=os.environ | proxy, capture_output=True, text=True)
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
    page = (ROOT / "docs/engines.md").read_text(encoding="utf-8")
    commands += [line.split() for line in re.findall(r"^\.venv/bin/(dask .*)$", page, re.MULTILINE)]
    return [words[1:] for words in commands]


@pytest.mark.parametrize("words", dask_commands(), ids=" ".join)
def test_dask_command_is_one_of_dask(words: list[str]) -> None:
    (entry,) = entry_points(group="dask_cli", name=words[0])
    context = entry.load().make_context(words[0], words[1:])
    assert words[0] == "scheduler" or context.params["preload"] == ("tasks.beam.pipeline",)


def test_compose_file_builds_the_worker_image() -> None:
    file = DEPLOY / "workers/compose.yaml"
    compose = yaml.safe_load(file.read_text(encoding="utf-8"))
    for service in compose["services"].values():
        root = (file.parent / service["build"]["context"]).resolve()
        assert (root, root / service["build"]["dockerfile"]) == (ROOT, file.parent / "Dockerfile")
        assert all(port.startswith("127.0.0.1:") for port in service.get("ports", []))
        for entry in service.get("env_file", []):
            assert (file.parent / entry["path"]).resolve() == ROOT / ".env"


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
