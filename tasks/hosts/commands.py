"""Commands of clusters' clients, such as sbatch, ssh and gcloud."""

from __future__ import annotations

import logging
import shlex
import signal
import subprocess
from collections.abc import Mapping, Sequence

log = logging.getLogger("kiln")


def run_command(
    command: Sequence[str],
    seconds: float,
    *,
    environment: Mapping[str, str] | None = None,
    text: str = "",
) -> str:
    """The stripped output of a command. Raises CalledProcessError, also after `seconds`.

    Args:
        environment: all of its variables; None: those of this process.
        text: its standard input.
    """
    log.debug("%s", shlex.join(command))
    try:
        done = subprocess.run(
            command,
            input=text,
            capture_output=True,
            text=True,
            check=True,
            timeout=seconds,
            env=environment,
        )
    except subprocess.TimeoutExpired:
        why = f"{command[0]} did not end within {seconds:g} s"
        raise subprocess.CalledProcessError(-signal.SIGKILL, list(command), "", why) from None
    return done.stdout.strip()


def message_of(error: subprocess.CalledProcessError) -> str:
    """The end of what a failed command printed, in one line."""
    return " ".join((error.stderr or error.stdout or "").split())[-500:]
