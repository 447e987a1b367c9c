"""Create or update this folder's automations on a Prefect server:

    apply.py [--team TEAM] [BLOCK] [FILE.yaml ...]

Files with ${BLOCK} need BLOCK, a notification block: type/name such as slack-webhook/team. It is
made once in the UI (Blocks, +) or by `prefect block`; the address it notifies is a secret of the
server, not of a file. An automation of the same name is updated, so a second call changes nothing;
a disabled one stays disabled. With TEAM, the automations are the team's own: they see its models
alone, and the runs with its tag.
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path
from typing import Any

import yaml
from prefect.client.orchestration import get_client
from prefect.events.schemas.automations import AutomationCore
from prefect.exceptions import ObjectNotFound

from configs.settings.recipe import TEAM
from flows.task_limits import team_tags
from flows.work_pools import put_automation

HERE = Path(__file__).parent
MODELS = "kiln.model."


def main(words: list[str]) -> int:
    """Apply the files, or all of the folder; the exit code is 2 if there is no such block."""
    parser = argparse.ArgumentParser(prog="apply.py")
    parser.add_argument("--team", default="")
    parser.add_argument("rest", nargs="*", metavar="BLOCK-TYPE/NAME or FILE.yaml")
    given = parser.parse_args(words)
    block = given.rest[0] if given.rest and not given.rest[0].endswith(".yaml") else ""
    kind, _, name = block.partition("/")
    files = [Path(word) for word in given.rest[bool(block) :]] or sorted(HERE.glob("*.yaml"))
    texts = [file.read_text(encoding="utf-8") for file in files]
    is_team = re.fullmatch(TEAM, given.team) or not given.team
    needs_block = block or any("${BLOCK}" in text for text in texts)
    if not is_team or (needs_block and not (kind and name)):
        print("usage: apply.py [--team TEAM] BLOCK-TYPE/NAME [FILE.yaml ...]", file=sys.stderr)
        return 2
    with get_client(sync_client=True) as client:
        try:
            block_id = str(client.read_block_document_by_name(name, kind).id) if block else ""
        except ObjectNotFound:
            print(f"no block {block} on {client.api_url}: create it first", file=sys.stderr)
            return 2
        for text in texts:
            described = yaml.safe_load(text.replace("${BLOCK}", block_id))
            if given.team:
                _narrow(described, given.team)
            automation = AutomationCore.model_validate(described)
            print(f"{put_automation(client, automation)}  {automation.name}")
    return 0


def _narrow(described: dict[str, Any], team: str) -> None:
    """Let an automation see the models of a team alone, or the runs with its tag."""
    described["name"] += f" ({team})"
    trigger = described["trigger"]
    if trigger["match"]["prefect.resource.id"].startswith(MODELS):
        trigger["match"] = {"prefect.resource.id": f"{MODELS}{team}/*"}
    else:
        (tag,) = team_tags(f"{team}/*")
        related = {"prefect.resource.role": "tag", "prefect.resource.id": f"prefect.tag.{tag}"}
        trigger["match_related"] = related


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
