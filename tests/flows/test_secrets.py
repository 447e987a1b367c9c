"""Secrets of URLs, settings and variables reach no store, log, page or database."""

import base64
import json
import logging
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from importlib import import_module
from pathlib import Path
from typing import Any

import aiohttp
import picture_sources
import pyarrow.parquet as pq
import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec
from kiln_command import command
from loopback_server import LoopbackServer
from prefect_server import Server
from toy_recipes import toy
from yarl import URL

from flows.cli import main

pytestmark = pytest.mark.slow
VISIBLE = "visible"  # the value of a harmless query parameter, which is kept
PASSWORD = "plantedPASSWORDmark"  # of the signing key
SWEEP = {"train.learning_rate": [1e-4, 2e-4]}
UNUSED = "http://127.0.0.1:9"  # nothing answers there


class Planted:
    """Distinct markers in the places of secrets."""

    def __init__(self) -> None:
        self.names: dict[str, str] = {}  # marker -> place

    def __call__(self, place: str) -> str:
        marker = f"planted{len(self.names):03d}mark"
        self.names[marker] = place
        return marker

    def url(self, place: str, root: str, path: str) -> str:
        """A URL with user, password, a signature and a harmless parameter."""
        scheme, _, host = root.partition("://")
        user = f"us:{self(f'password of {place}')}"
        query = f"name={VISIBLE}&sig={self(f'query of {place}')}"
        return f"{scheme}://{user}@{host}/{path}?{query}"

    def found_in(self, folder: Path) -> dict[str, list[str]]:
        """Place -> files below a folder that contain its secret."""
        leaks: dict[str, list[str]] = {}
        for file in sorted(path for path in folder.rglob("*") if path.is_file()):
            for place in self.found(contents(file)):
                leaks.setdefault(place, []).append(str(file.relative_to(folder)))
        return leaks

    def found(self, data: bytes) -> list[str]:
        return [
            place
            for marker, place in self.names.items()
            if marker.encode() in data or base64.b64encode(f"us:{marker}".encode()) in data
        ]


def contents(file: Path) -> bytes:
    if file.suffix == ".parquet":  # compressed
        return json.dumps(pq.read_table(file).to_pylist(), default=str).encode()
    return file.read_bytes()


@contextmanager
def serving(files: dict[str, bytes]) -> Iterator[str]:
    """URL of a server that answers 200, 404 and, below /denied, 403."""

    class Handler(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self.do_GET()

        def do_GET(self) -> None:
            path = self.path.partition("?")[0]
            found = files.get(path.strip("/"))
            status = 403 if "denied" in path else 404 if found is None else 200
            self.send_response(status)
            self.send_header("Content-Length", str(len(found or b"")))
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(found or b"")

    with LoopbackServer(Handler) as server:
        yield server.url


def call(capsys: pytest.CaptureFixture[str], *words: str, **overrides: Any) -> tuple[int, str]:
    """The exit code of a command, and all that it prints; a traceback has code 1."""
    sys.argv = command(*words, overrides=overrides)[2:]
    code: Any = 1
    try:
        main()
    except SystemExit as end:
        code = end.code or 0
    except Exception:
        traceback.print_exc()
    said = capsys.readouterr()
    return code, said.err + said.out


def flush_logs() -> None:
    """Send the lines that Prefect's handlers have queued."""
    for handler in logging.getLogger("kiln").handlers:
        handler.flush()


@pytest.fixture
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A Prefect server whose database is its own."""
    server = Server(tmp_path_factory.mktemp("prefect-server"))
    server.serve()
    yield server
    server.stop()


@pytest.fixture
def worker_logs() -> Iterator[None]:
    """Prefect's lines are logged as in a worker: `kiln` itself replaces them."""
    import_module("prefect.main")  # configures the loggers
    loggers = [logging.getLogger(f"prefect.{name}") for name in ("flow_runs", "task_runs")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.INFO)
    yield
    for logger, level in zip(loggers, levels, strict=True):
        logger.setLevel(level)


def plant_in_environment(planted: Planted, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Credentials in variables, and in the file that Google's variable names."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "HF_TOKEN",
                 "WANDB_API_KEY", "PREFECT_API_KEY", "FSSPEC_S3_SECRET", "FSSPEC_GS_TOKEN",
                 "GOOGLE_API_KEY"):  # fmt: skip
        monkeypatch.setenv(name, planted(name))
    google = folder / "google.json"
    google.write_text(json.dumps({"private_key": planted("Google's private key")}))
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(google))
    planted.names[PASSWORD] = "KILN_SIGNING_PASSWORD"
    monkeypatch.setenv("KILN_SIGNING_PASSWORD", PASSWORD)


def locked_key(folder: Path) -> Path:
    """A private key that PASSWORD opens."""
    encoding = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
    locked = serialization.BestAvailableEncryption(PASSWORD.encode())
    file = folder / "key.pem"
    file.write_bytes(ec.generate_private_key(ec.SECP256R1()).private_bytes(*encoding, locked))
    return file


def listed(planted: Planted, www: str, names: list[str]) -> bytes:
    """A list of pictures, and of rows that fail in several ways."""
    urls = [planted.url("a row", www, name) for name in names]
    urls += [
        f"{names[0]}?again=1&token={planted('query of a relative row')}",
        planted.url("a missing row", www, "nowhere.png"),
        planted.url("a denied row", www, "denied.png"),
        planted.url("a refused row", UNUSED, "a.png"),
        planted.url("another scheme", "ftp://example.org", "a.png"),
        f"s3://key:{planted('key of a row')}@bucket/a.png",
        f"http://us:{planted('an invalid URL')}@[/a.png",
    ]
    rows = [
        json.dumps(
            {
                "url": url,
                "caption": f"picture {n}",
                "page": planted.url("an additional column", www, f"page/{n}"),
            }
        )
        for n, url in enumerate(urls)
    ]
    rows.append(f'{{"url": "{planted("a malformed line")}')
    return "\n".join(rows).encode()


@pytest.mark.extended
def test_planted_secrets_are_nowhere(
    tmp_path: Path,
    server: Server,
    at_home: Callable[[str], None],
    worker_logs: None,
    tiny_model: Callable[[str], Path],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    at_home(server.api)
    monkeypatch.setattr(sys, "argv", [])
    planted, said, files = Planted(), "", {}
    plant_in_environment(planted, tmp_path_factory.mktemp("credentials"), monkeypatch)
    signing_key = locked_key(tmp_path_factory.mktemp("keys"))
    pictures = picture_sources.make_pictures()
    files = {f"{one.name}.png": one.png for one in pictures}
    with serving(files) as www:
        files["list.jsonl"] = listed(planted, www, list(files))
        files["prompts.txt"] = b"a drawing of a fox\n"
        source = {
            "kind": "urls",
            "path": planted.url("source.path", www, "list.jsonl"),
            "format": "jsonl",
            "base_url": planted.url("source.base_url", www, "base/"),
            "additional_columns": ["page"],
        }
        overrides = {
            **toy("sd2", tmp_path / "store", source, tiny_model),
            "download.allow_hosts": [www.removeprefix("http://"), "127.0.0.1:9"],
            "download.retries": 0,
            "download.max_failed": 0.9,
            "download.max_transient": 0.9,
            "evaluate.prompts.new.prompts": [],
            "evaluate.prompts.new.file": planted.url("a file of prompts", www, "prompts.txt"),
            "train.wandb": {"project": "tests", "mode": "offline"},
            "publish.signing_key": str(signing_key),
            "beam.s3_secret_access_key": planted("beam.s3_secret_access_key"),
        }
        code, said = call(capsys, "run", "sd2", "--json", **overrides)
        assert code == 0, said
        report = json.loads(said.splitlines()[-1])
        assert report["status"] == "published"

        recipe = tmp_path / "recipe" / "mine.yaml"
        recipe.parent.mkdir()
        recipe.write_text(json.dumps({"extends": "sd2", "source": source}), encoding="utf-8")
        rest = {name: value for name, value in overrides.items() if name != "source"}
        code, again = call(capsys, "run", str(recipe), "--json", **rest)
        assert code == 0 and json.loads(again.splitlines()[-1])["model"] == report["model"], again
        said += again

        for wrong, words in failures(planted, www).items():
            name, value = wrong
            code, line = call(capsys, "run", "sd2", **{**overrides, name: value})
            assert code in (1, 2) and words in line, (name, line)
            said += line
        for command_name in ("retrain", "sweep"):
            path = planted.url(f"the list of {command_name}", www, "denied.jsonl")
            given = {**overrides, "source.path": path, "sweep.values": SWEEP}
            code, line = call(capsys, command_name, "sd2", **given)
            assert code in (1, 2) and "source" in line, line
            said += line
        for words in commands(planted, www):
            code, line = call(capsys, *words)
            assert code in (1, 2), line
            said += line
        name = Path(report["model"]).parent.name
        signed = ("--key", str(signing_key), "--store", overrides["store"])
        code, line = call(capsys, "sign", name, *signed)
        assert code == 0, line
        monkeypatch.setenv("KILN_SIGNING_PASSWORD", planted("a wrong KILN_SIGNING_PASSWORD"))
        code, again = call(capsys, "sign", name, *signed)
        assert code in (1, 2), again
        said += line + again

    flush_logs()
    logs = server.ask("/logs/filter", {"limit": 200, "sort": "TIMESTAMP_DESC"})
    server.stop()
    assert not planted.found(said.encode()), said
    assert not planted.found_in(server.folder)
    recipe.unlink()
    assert not planted.found_in(tmp_path)
    kept = f"?name={VISIBLE}&sig=..."
    assert kept in said  # without the secrets, failures are shown
    assert any(kept in log["message"] for log in logs)
    assert kept in (Path(report["model"]) / "README.md").read_text(encoding="utf-8")


def failures(planted: Planted, www: str) -> dict[tuple[str, Any], str]:
    """{(setting, value): words of the error}."""
    key = f"key:{planted('S3 secret')}@bucket"
    login = f"us:{planted('hub token')}@owner/name"
    return {
        ("source.path", planted.url("an unreachable list", UNUSED, "a.jsonl")): "source",
        ("source.path", planted.url("a denied list", www, "denied.jsonl")): "source",
        ("source.path", planted.url("a missing list", www, "missing.jsonl")): "source.path",
        ("source.path", f"s3://{key}/a.jsonl"): "source.path: a URL with user and password",
        ("source.path", f"hf://{login}"): "source.path: a URL with user and password",
        ("store", f"s3://{key}/store"): "store: a URL with a secret is refused",
        ("publish.registry", f"s3://{key}/r"): "publish.registry: a URL with a secret",
        ("model.path", planted.url("a model", www, "model")): "model.path: a URL with a secret",
        ("model.path", f"hf://{login}"): "model.path: a URL with a secret",
        ("evaluate.clip", f"s3://{key}/clip"): "evaluate.clip: a URL with a secret",
        ("evaluate.prompts.new.file", planted.url("prompts", UNUSED, "a.txt")): "evaluate.prompts",
        ("evaluate.prompts.new.file", planted.url("denied", www, "denied.txt")): "evaluate.prompts",
    }  # fmt: skip


def commands(planted: Planted, www: str) -> Iterator[list[str]]:
    yield ["ls", "--store", f"s3://key:{planted('--store')}@bucket/store"]
    yield ["rollback", "m", "--registry", f"s3://key:{planted('--registry')}@bucket/store"]
    registry = f"s3://key:{planted('--registry of push')}@bucket/store"
    yield ["push", "m", "owner/name", "--registry", registry]
    yield ["push", "m", f"https://us:{planted('a repository')}@hub/owner/name"]
    yield ["sign", "m", "--key", "none.pem", "--registry", registry]
    yield ["generate", planted.url("a drawn model", www, "model"), "a fox"]
    file = planted.url("a file of prompts", UNUSED, "a.txt")
    yield ["generate", "digits", "--from-file", file]
    yield ["generate", "digits", "-o", f"file={planted.url('an option', www, 'denied.txt')}"]


@pytest.mark.extended
def test_the_traceback_of_a_library_has_no_secrets(
    tmp_path: Path,
    server: Server,
    at_home: Callable[[str], None],
    worker_logs: None,
    tiny_model: Callable[[str], Path],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    at_home(server.api)
    monkeypatch.setattr(sys, "argv", [])
    planted = Planted()
    url = URL(planted.url("a bug", UNUSED, "a.png"))

    def plan(recipe: Any, begin: Any) -> Any:
        request: Any = aiohttp.RequestInfo(url, "GET", {}, url)  # type: ignore[arg-type]
        try:
            raise aiohttp.ClientResponseError(request, (), status=500, message="broken")
        except aiohttp.ClientError as error:
            logging.getLogger("kiln").exception("GET %s", url)
            raise KeyError(f"no answer of {url}") from error

    monkeypatch.setattr("tasks.download.plan", plan)
    write_list(tmp_path / "list.jsonl")
    source = {"kind": "urls", "format": "jsonl", "path": str(tmp_path / "list.jsonl")}
    code, said = call(capsys, "run", "sd2", **toy("sd2", tmp_path / "store", source, tiny_model))
    flush_logs()
    logs = server.ask("/logs/filter", {"limit": 200, "sort": "TIMESTAMP_DESC"})
    server.stop()
    assert code == 1 and "Traceback" in said and f"?name={VISIBLE}&sig=..." in said
    assert any(log["message"].startswith("GET http://127.0.0.1:9/a.png?name=") for log in logs)
    assert any("Encountered exception" in log["message"] for log in logs)
    assert not planted.found(said.encode())
    assert not planted.found_in(server.folder)
    assert not planted.found_in(tmp_path)


def write_list(file: Path) -> None:
    file.write_text('{"url": "http://example.org/a.png", "caption": "a"}\n', encoding="utf-8")


def test_a_secret_typed_into_the_form_is_refused_and_not_repeated(
    tmp_path: Path, api: str, at_home: Callable[[str], None]
) -> None:
    at_home(api)
    from flows.finetune import finetune

    planted, server = Planted(), Server(tmp_path, api)
    overrides = {"source.path": planted.url("the form", UNUSED, "a.jsonl")}
    state: Any = finetune("sd2", overrides, return_state=True)
    known = server.ask(f"/flow_runs/{state.state_details.flow_run_id}")["state"]
    flush_logs()
    run = {"flow_run_id": {"any_": [str(state.state_details.flow_run_id)]}}
    logs = server.ask("/logs/filter", {"logs": run})
    assert known["name"] == "Failed"
    assert "a secret in a parameter is refused" in known["message"]
    assert not planted.found(json.dumps([known, logs]).encode())
