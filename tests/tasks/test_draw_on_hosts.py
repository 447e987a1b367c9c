"""Pictures drawn on hosts of a cluster: what the flow counts."""

from pathlib import Path
from typing import Any

import pytest

from artifacts.store import KeyParts, Store
from configs.settings.clusters import Ssh
from runtimes.process.job import Drawing, GenerateJob
from tasks.evaluate import draw_on_hosts
from tasks.hosts.choose import Hosts


def test_files_of_losses_are_no_drawn_pictures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Store(str(tmp_path))
    draft = store.draft(KeyParts("evaluate", 1, {}, {}))
    out = tmp_path / "drawing"
    out.mkdir()
    (out / "00000.png").touch()

    def draw(_: Any, kept: Any, tell: Any, **__: Any) -> dict[str, Any]:
        for name in ("00001.png", "losses.json"):
            (out / name).touch()
        tell({"event": "drawn"})
        return {"event": "result"}

    monkeypatch.setattr(draw_on_hosts, "run_hosts_job", draw)
    hosts = Hosts(Ssh(hosts=("one", "two")), count=2, runtime="torch", grace=1.0)
    job = GenerateJob("torch", str(tmp_path), (Drawing(str(out)),), ("a", "b", "c"), {})
    told: list[dict[str, Any]] = []
    draw_on_hosts.DrawOnHosts(hosts, draft)(job, told.append)
    assert told == [{"event": "drawn", "done": 2, "total": 3}, {"event": "result", "drawn": 1}]
