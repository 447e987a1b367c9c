"""Run in a runtime's environment: functions of a driver, each call in a fork of this process.

python -P inside_process.py DRIVER FD    reads `[name, arguments]` a line, answers on descriptor FD
"""

import importlib.util
import json
import os
import sys
import traceback
from pathlib import Path
from types import ModuleType
from typing import Any


def load(path: Path) -> ModuleType:
    """The driver as a module."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


def answer(driver: ModuleType, name: str, arguments: list[Any]) -> dict[str, Any]:
    try:
        return {"found": getattr(driver, name)(*arguments)}
    except BaseException:
        return {"failed": traceback.format_exc()}


def write(number: int, facts: dict[str, Any]) -> None:
    with os.fdopen(os.dup(number), "w") as stream:
        stream.write(json.dumps(facts) + "\n")


def main(path: str, descriptor: str) -> None:
    tests = Path(__file__).parent
    # What tests share; the checkout comes first, as both have a folder `runtimes`.
    sys.path += [str(tests.parent), str(tests)]
    driver, number = load(Path(path)), int(descriptor)
    for line in sys.stdin:
        name, arguments = json.loads(line)
        child = os.fork()
        if child == 0:
            write(number, answer(driver, name, arguments))
            os._exit(0)  # what the packages do at exit is for the process that was forked
        _, status = os.waitpid(child, 0)
        write(number, {"ended": os.waitstatus_to_exitcode(status)})


if __name__ == "__main__":
    main(*sys.argv[1:])
