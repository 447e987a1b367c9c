"""Main program of DriverProcess: call functions of a driver file.

    python -P driver_process_main.py fork|stay DRIVER CALLS ANSWERS

Reads one JSON line `[name, arguments]` per call from descriptor CALLS, and writes the results as
JSON lines to ANSWERS.
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
    """The result of a function, or its traceback."""
    try:
        return {"found": getattr(driver, name)(*arguments)}
    except BaseException:
        return {"failed": traceback.format_exc()}


def write(number: int, facts: dict[str, Any]) -> None:
    """Write a JSON line to a descriptor."""
    with os.fdopen(os.dup(number), "w") as stream:
        stream.write(json.dumps(facts) + "\n")


def main(mode: str, path: str, calls: str, answers: str) -> None:
    """Run calls until CALLS is closed."""
    tests = Path(__file__).parent
    # Modules of tests/; the checkout precedes them because both have a folder `runtimes`.
    sys.path += [str(tests.parent), str(tests)]
    driver, output = load(Path(path)), int(answers)
    with os.fdopen(int(calls)) as lines:
        for line in lines:
            name, arguments = json.loads(line)
            if mode == "stay":
                write(output, answer(driver, name, arguments) | {"ended": 0})
                continue
            child = os.fork()
            if child == 0:
                write(output, answer(driver, name, arguments))
                os._exit(0)  # without exit handlers, which belong to the parent
            _, status = os.waitpid(child, 0)
            write(output, {"ended": os.waitstatus_to_exitcode(status)})


if __name__ == "__main__":
    main(*sys.argv[1:])
