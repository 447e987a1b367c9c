"""Create or update this folder's automations on a Prefect server:  apply.py [BLOCK] [FILE.yaml ...]

Files with ${BLOCK} need BLOCK, a notification block: type/name such as slack-webhook/team. It is
made once in the UI (Blocks, +) or by `prefect block`; the address it notifies is a secret of the
server, not of a file. An automation of the same name is updated, so a second call changes nothing;
a disabled one stays disabled.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import yaml
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.events.schemas.automations import AutomationCore
from prefect.exceptions import ObjectNotFound

from flows.work_pools import put_automation

HERE = Path(__file__).parent


def main(words: list[str]) -> int:
    """Apply the files, or all of the folder; the exit code is 2 if there is no such block."""
    block = words[0] if words and not words[0].endswith(".yaml") else ""
    kind, _, name = block.partition("/")
    files = [Path(word) for word in words[bool(block) :]] or sorted(HERE.glob("*.yaml"))
    texts = [file.read_text(encoding="utf-8") for file in files]
    if not (kind and name) and (block or any("${BLOCK}" in text for text in texts)):
        print("usage: apply.py BLOCK-TYPE/NAME [FILE.yaml ...]", file=sys.stderr)
        return 2
    with get_client(sync_client=True) as client:
        try:
            found = str(client.read_block_document_by_name(name, kind).id) if block else ""
        except ObjectNotFound:
            print(f"no block {block} on {client.api_url}: create it first", file=sys.stderr)
            return 2
        for text in texts:
            _apply(client, yaml.safe_load(text.replace("${BLOCK}", found)))
    return 0


def _apply(client: SyncPrefectClient, described: dict[str, Any]) -> None:
    automation = AutomationCore.model_validate(described)
    print(f"{put_automation(client, automation)}  {automation.name}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
