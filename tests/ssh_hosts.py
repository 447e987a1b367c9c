"""A stand-in for `ssh`, whose hosts are this machine."""

import os
import stat
from pathlib import Path

import pytest

#: Without its options, `ssh HOST COMMAND` starts a shell; a lost connection is a closed pipe. Host
#: `frozen` says who it is and nothing more; each connection to `cut` ends, until {folder}/mended.
SSH = """\
#!/bin/bash
while [[ $1 == -* && $1 != -- ]]; do shift; done
[[ $1 == -- ]] || {{ echo "ssh: no -- before the host" >&2; exit 255; }}
shift
[[ $1 != away* ]] || {{ echo "ssh: connect to host $1 port 22: Connection refused" >&2; exit 255; }}
[[ $1 != apart* ]] || set -- "$1" "${{2//test -e/test ! -e}}" # it has no such file
if [[ $2 == *"--host "* ]]; then
  [[ $1 != cut* || -e {folder}/mended ]] || {{ touch {folder}/mended; exit 255; }}
  number=$(sed 's/.*--host \\([0-9]*\\).*/\\1/' <<<"$2")
  [[ $1 != frozen* ]] || {{
    echo "{{\\"host\\": $number, \\"event\\": \\"host\\", \\"name\\": \\"$1\\"}}"
    exec sleep 600
  }}
fi
exec bash -c "$2"
"""


def stand_in(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Put the stand-in on PATH."""
    program = folder / "bin" / "ssh"
    program.parent.mkdir()
    program.write_text(SSH.format(folder=program.parent), encoding="utf-8")
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
