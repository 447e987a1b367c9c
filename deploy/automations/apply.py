"""Create or update the automations of this folder on a Prefect server:  apply.py BLOCK [FILE ...]

BLOCK is a notification block, type/name such as slack-webhook/team. It is made once in the UI
(Blocks, +) or by `prefect block`; the address it notifies is a secret of the server, not of a file.
An automation of the same name is updated, so a second call changes nothing.
"""

from __future__ import annotations

import sys
from pathlib import Path

import yaml
from prefect.client.orchestration import get_client
from prefect.events.schemas.automations import AutomationCore
from prefect.exceptions import ObjectNotFound

HERE = Path(__file__).parent


def main(words: list[str]) -> int:
    """Apply the files, or all of the folder; the exit code is 2 if there is no such block."""
    if not words or not all(words[0].partition("/")):
        print("usage: apply.py BLOCK-TYPE/NAME [FILE ...]", file=sys.stderr)
        return 2
    kind, _, name = words[0].partition("/")
    files = [Path(word) for word in words[1:]] or sorted(HERE.glob("*.yaml"))
    with get_client(sync_client=True) as client:
        try:
            block = client.read_block_document_by_name(name, kind)
        except ObjectNotFound:
            print(f"no block {words[0]} on {client.api_url}: create it first", file=sys.stderr)
            return 2
        for file in files:
            text = file.read_text(encoding="utf-8").replace("${BLOCK}", str(block.id))
            automation = AutomationCore.model_validate(yaml.safe_load(text))
            same = client.read_automations_by_name(automation.name)
            if same:
                client.update_automation(same[0].id, automation)
            else:
                client.create_automation(automation)
            print(f"{'updated' if same else 'created'}  {automation.name}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
