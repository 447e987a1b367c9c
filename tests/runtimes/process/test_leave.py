"""How a runtime's process ends."""

import subprocess
import sys
import textwrap


def end(code: str) -> tuple[int, str]:
    """Exit code and output of a script."""
    words = [sys.executable, "-c", textwrap.dedent(code)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120, check=False)
    assert not done.stderr
    return done.returncode, done.stdout


def test_a_process_leaves_with_its_handlers_and_output_but_without_a_teardown() -> None:
    """In a teardown, a thread of a collective that drops its tensor aborts the process."""
    found = end("""
        import atexit
        from runtimes.process.launcher import leave

        class Tensor:
            def __del__(self):
                print("dropped")

        kept = Tensor()
        atexit.register(print, "handled")
        print("buffered", end=" ")
        leave(7)
        """)
    assert found == (7, "buffered handled\n")


def test_a_runtime_s_process_leaves_so() -> None:
    found = end("""
        import runpy, sys
        import runtimes.process.launcher as module

        sys.stderr, sys.argv = sys.stdout, ["runtimes", "one", "too many"]
        module.leave = lambda code: print("left", code)
        runpy.run_module("runtimes", run_name="__main__")
        """)
    assert found[0] == 0
    assert found[1].splitlines()[-1] == "left 2"
