"""Run gcloud and tell its failures apart."""

from __future__ import annotations

import logging
import os
import shlex
import signal
import subprocess

from tasks.build_or_reuse import TransientError
from tasks.tpu.commands import Command

COMMAND_SECONDS = 3600.0  # timeout; creation and set-up take minutes
QUERY_SECONDS = 60.0  # timeout of a query of a state
log = logging.getLogger("kiln")


class SliceUnavailable(TransientError):
    """No slice is available now; the message states the reason."""


def run_command(command: Command, seconds: float = COMMAND_SECONDS) -> str:
    """The stripped output of a command. Raises CalledProcessError, also after `seconds`."""
    log.debug("%s", shlex.join(command))
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=True,
            timeout=seconds,
            env={**os.environ, "CLOUDSDK_CORE_DISABLE_PROMPTS": "1"},  # a prompt would hang unseen
        )
    except subprocess.TimeoutExpired:
        why = f"gcloud did not end within {seconds:g} s"
        raise subprocess.CalledProcessError(-signal.SIGKILL, command, "", why) from None
    return done.stdout.strip()


def describe(command: Command) -> str:
    """The output of a `describe` command; '' if the resource does not exist."""
    try:
        return run_command(command, QUERY_SECONDS)
    except subprocess.CalledProcessError as error:
        if is_missing(error):
            return ""
        raise SliceUnavailable(f"gcloud does not answer: {message_of(error)}") from None


def is_missing(error: subprocess.CalledProcessError) -> bool:
    return "NOT_FOUND" in error.stderr or "not found" in error.stderr.lower()


def message_of(error: subprocess.CalledProcessError) -> str:
    return " ".join((error.stderr or error.stdout or "").split())[-500:]
