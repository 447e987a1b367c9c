"""The automations of deploy/automations, on a server: applied twice, and the webhook they call."""

import json
from collections.abc import Iterator
from functools import partial
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import pytest
import yaml
from kiln_command import ROOT, python
from loopback_server import LoopbackServer
from prefect_server import TIMEOUT, Server

pytestmark = pytest.mark.soak
APPLY = ROOT / "deploy/automations/apply.py"
#: Makes the block, as a team does it in the UI, then runs a flow that announces three models.
RUN = """
import sys
from prefect import flow
from prefect.blocks.notifications import CustomWebhookNotificationBlock
from flows.finetune import emit_awaiting, emit_published, emit_rejected

url = sys.argv[1]
if url != "emit":
    shape = {"subject": "{{subject}}", "body": "{{body}}"}
    block = CustomWebhookNotificationBlock(name="team", url=url, json_data=shape)
    block.save("team", overwrite=True)
    sys.exit()

@flow
def announce():
    emit_published("automated", "s3://kiln/registry/automated/v3", {"cmmd": 0.05})
    candidate = {"version": "v4", "champion": "v3", "until": "2026-12-13"}
    registered = {"candidate": candidate, "model": "s3://kiln/registry/automated/v4"}
    emit_awaiting("automated", registered, "/deployments/deployment/1/run?parameters=filled")
    emit_rejected("automated", "the gate rejected the model: cmmd < base", [])
    raise RuntimeError("broken on purpose")

announce(return_state=True)
"""


@pytest.fixture
def webhook() -> Iterator[tuple[str, list[dict[str, str]]]]:
    """URL of a webhook, and what it was sent."""
    got: list[dict[str, str]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            got.append(json.loads(self.rfile.read(int(self.headers["content-length"]))))
            self.send_response(200)
            self.end_headers()

    with LoopbackServer(Handler) as server:
        yield f"{server.url}/", got


def test_a_team_is_notified_of_published_rejected_and_failed(
    tmp_path: Path, api: str, webhook: tuple[str, list[dict[str, str]]]
) -> None:
    server = Server(tmp_path, api)
    url, got = webhook
    run = partial(python, env=server.env)
    missing = run(str(APPLY), "custom-webhook/nobody")
    assert missing.returncode == 2 and "no block custom-webhook/nobody" in missing.stderr
    assert run("-c", RUN, url).returncode == 0
    for said in ("created", "updated"):
        done = run(str(APPLY), "custom-webhook/team")
        assert done.returncode == 0, done.stderr
        assert [line.split()[0] for line in done.stdout.splitlines()] == [said] * 6
    names = [one["name"] for one in server.ask("/automations/filter", {})]
    for path in APPLY.parent.glob("*.yaml"):  # each once
        assert names.count(yaml.safe_load(path.read_text(encoding="utf-8"))["name"]) == 1
    try:
        assert run("-c", RUN, "emit").returncode == 0
        subjects = {"automated v3 is published", "automated is not published"}
        subjects |= {"automated v4 awaits approval"}

        def notified() -> bool:
            found = {one["subject"] for one in got}
            return subjects <= found and any(one.endswith(": Failed") for one in found)

        server.wait("notifications", notified, TIMEOUT)
        (published,) = [one for one in got if one["subject"] == "automated v3 is published"]
        assert "s3://kiln/registry/automated/v3/report.html" in published["body"]
        (awaiting,) = [one for one in got if one["subject"] == "automated v4 awaits approval"]
        form = f"{api.removesuffix('/api')}/deployments/deployment/1/run?parameters=filled"
        assert form in awaiting["body"]
    finally:  # other tests share the server
        for one in server.ask("/automations/filter", {}):
            if one["name"].startswith("kiln: "):
                server.ask(f"/automations/{one['id']}", method="DELETE")
