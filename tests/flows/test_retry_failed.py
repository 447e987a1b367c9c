"""`kiln run --retry-failed`: rows with transient failures are fetched again."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import picture_sources
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from loopback_server import free_port

from tasks.download.folders import serve_folder

pytestmark = pytest.mark.slow


def _served_at(base: str, hosts: tuple[str, ...]) -> str:
    return hosts[0]


def test_pictures_of_a_host_that_was_away_stay_in_all_later_runs(
    small: dict[str, Any], here: Callable[..., str], api: str, tmp_path: Path
) -> None:
    pictures = picture_sources.make_pictures(6)
    picture_sources.write_folder(tmp_path / "www", pictures)
    port = free_port()

    def download(*words: str) -> Any:
        said = here(
            *("run", "digits", "--json", "--until", "download", *words),
            overrides=overrides,
            api=api,
        )
        stage = json.loads(said.splitlines()[-1])["stages"]["download"]
        summary = json.loads((Path(stage["uri"]) / "manifest.json").read_bytes())["summary"]
        return stage["outcome"], summary["outcomes"]

    with serve_folder(tmp_path / "www", 0, _served_at) as host:
        hosts = [host] * 4 + [f"127.0.0.1:{port}"] * 2
        rows = [
            {"url": f"http://{host}/{one.name}.png", "caption": one.name}
            for host, one in zip(hosts, pictures, strict=True)
        ]
        pq.write_table(pa.Table.from_pylist(rows), tmp_path / "list.parquet")
        overrides = {name: v for name, v in small.items() if not name.startswith("source.")}
        overrides["source"] = {"kind": "urls", "path": str(tmp_path / "list.parquet")}
        overrides |= {"download.allow_hosts": ["127.0.0.1"], "download.backoff": 0.0}
        lost = {"host does not answer": 2, "success": 4}
        assert download() == ("built", lost)
    with serve_folder(tmp_path / "www", port, _served_at):
        assert download("--retry-failed") == ("built", {"success": 6})
        assert download() == ("reused", {"success": 6})
