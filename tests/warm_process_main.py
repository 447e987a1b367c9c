"""Main program of the warm interpreter: run modules in forks that have imported PyTorch already.

    python -P -u warm_process_main.py SOCKET

Each message of the socket is a JSON object, which WarmProcess makes, with descriptors: those of a
process, and one for answers. On it the process writes its process id, and its keeper, a second fork
that waits for it, the exit code; both as JSON lines.
"""

import importlib
import json
import os
import random
import runpy
import signal
import socket
import sys
from pathlib import Path
from typing import Any

#: What a job of runtime torch imports, and an encoder's process.
IMPORTED = (
    "diffusers.loaders.peft",
    "diffusers.models.autoencoders.autoencoder_kl",
    "diffusers.models.unets.unet_2d_condition",
    "diffusers.pipelines.stable_diffusion.pipeline_stable_diffusion",
    "diffusers.pipelines.stable_diffusion_xl.pipeline_stable_diffusion_xl",
    "diffusers.schedulers.scheduling_ddim",
    "peft",
    "transformers.models.clip.modeling_clip",
    "transformers.models.clip.tokenization_clip",
)
MOST = 1 << 20  # bytes of a message
MOST_DESCRIPTORS = 4096


def fork(given: dict[str, Any], descriptors: list[int]) -> bool:
    """Fork a keeper and its process; True in the process alone, which is to run the module."""
    *theirs, told = descriptors
    if os.fork() != 0:
        for number in descriptors:
            os.close(number)
        return False
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    if (child := os.fork()) == 0:
        if given["new_session"]:
            os.setsid()
        tell(told, pid=os.getpid())  # the session is there, so that it may be signalled
        become(given, theirs)
        return True
    for number in theirs:
        os.close(number)
    _, status = os.waitpid(child, 0)
    tell(told, code=os.waitstatus_to_exitcode(status))
    os._exit(0)


def tell(number: int, **facts: int) -> None:
    """Write a JSON line to a descriptor."""
    os.write(number, (json.dumps(facts) + "\n").encode())


def become(given: dict[str, Any], descriptors: list[int]) -> None:
    """Take on the descriptors, variables, folder and arguments of a new process."""
    # First out of the way of the wanted numbers, then to them.
    above = 1 + max(*descriptors, *given["numbers"])
    moved = [(os.dup2(old, above + n, inheritable=False)) for n, old in enumerate(descriptors)]
    for number, held in zip(given["numbers"], moved, strict=True):
        os.dup2(held, number)
    kept = sorted({0, 1, 2, *given["numbers"]})
    for low, high in zip(kept, [*kept[1:], MOST_DESCRIPTORS], strict=True):
        os.closerange(low + 1, high)
    os.environ.clear()
    os.environ.update(given["variables"])
    os.chdir(given["folder"])
    sys.argv = ["-m", *given["words"]]


def main(number: int) -> None:
    """Fork for each message until the socket is closed."""
    tests = Path(__file__).parent
    # Runs of a test's folder import the checkout, and not the folder of this file.
    sys.path[:] = [str(tests.parent), *(path for path in sys.path if path != str(tests))]
    for name in IMPORTED:
        importlib.import_module(name)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the keepers
    requests = socket.socket(fileno=number)
    while True:
        message, descriptors, _, _ = socket.recv_fds(requests, MOST, 64)
        if not message:
            return
        given = json.loads(message)
        if fork(given, descriptors):
            requests.detach()  # its number is closed, and may be another's soon
            random.seed()
            runpy.run_module(given["module"], run_name="__main__", alter_sys=True)
            return


if __name__ == "__main__":
    main(int(sys.argv[1]))
