"""Run in a runtime's environment: call functions of a driver.

python -P driver_process_main.py fork|stay DRIVER CALLS ANSWERS

Reads `[name, arguments]` a line from descriptor CALLS, answers on ANSWERS.
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
    """What a function gives, or how it failed."""
    try:
        return {"found": getattr(driver, name)(*arguments)}
    except BaseException:
        return {"failed": traceback.format_exc()}


def write(number: int, facts: dict[str, Any]) -> None:
    """A line on a descriptor."""
    with os.fdopen(os.dup(number), "w") as stream:
        stream.write(json.dumps(facts) + "\n")


def main(mode: str, path: str, calls: str, answers: str) -> None:
    """Answer calls until there are no more."""
    tests = Path(__file__).parent
    # What tests share; the checkout comes first, as both have a folder `runtimes`.
    sys.path += [str(tests.parent), str(tests)]
    driver, said = load(Path(path)), int(answers)
    with os.fdopen(int(calls)) as lines:
        for line in lines:
            name, arguments = json.loads(line)
            if mode == "stay":
                write(said, answer(driver, name, arguments) | {"ended": 0})
                continue
            child = os.fork()
            if child == 0:
                write(said, answer(driver, name, arguments))
                os._exit(0)  # what the packages do at exit is for the process that was forked
            _, status = os.waitpid(child, 0)
            write(said, {"ended": os.waitstatus_to_exitcode(status)})


if __name__ == "__main__":
    main(*sys.argv[1:])
