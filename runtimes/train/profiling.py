"""A profiler trace of selected steps, stored in `<work>/profile`."""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from fsspec import AbstractFileSystem
from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem

from configs.secrets import one_line
from configs.settings.train_parts import Profile
from runtimes.contract import Runtime

log = logging.getLogger("kiln")


class Profiling:
    """Traces `steps` steps, the first one at index `start` (from 0).

    A run that resumes after `start` has no trace.
    """

    def __init__(self, settings: Profile, work: str, runtime: Runtime) -> None:
        self._start = settings.start
        self._end = settings.start + settings.steps
        self._work = work
        self._runtime = runtime
        self._tracing = ExitStack()

    def changes(self, step: int) -> bool:
        """Whether a trace starts or ends before this step."""
        return self._start < self._end and step in (self._start, self._end)

    def before(self, step: int) -> None:
        """Start or end the trace, if it is due before this step."""
        if step == self._end:
            self.close()
        elif step == self._start:
            folder = self._tracing.enter_context(_trace_folder(self._work))
            self._tracing.enter_context(self._runtime.profile(folder))

    def close(self) -> None:
        """End the trace, if one is active."""
        self._tracing.close()


@contextmanager
def _trace_folder(work: str) -> Iterator[str]:
    """A local folder for the trace; at exit its files are in `<work>/profile`.

    A remote store that does not accept them costs the trace, but not the training.
    """
    fs, root = url_to_fs(work)
    target = f"{root.rstrip('/')}/profile"
    if isinstance(fs, LocalFileSystem):
        fs.makedirs(target, exist_ok=True)
        yield target
        return
    with tempfile.TemporaryDirectory(prefix="kiln-profile-") as folder:
        yield folder
        try:
            _upload(Path(folder), fs, target)
        except Exception as error:  # clients of remote stores define their own exception types
            log.warning("the profiler trace could not be stored: %s", one_line(error))


def _upload(folder: Path, fs: AbstractFileSystem, target: str) -> None:
    for path in sorted(p for p in folder.rglob("*") if p.is_file()):
        name = path.relative_to(folder).as_posix()
        fs.makedirs(f"{target}/{name}".rpartition("/")[0], exist_ok=True)
        fs.put_file(str(path), f"{target}/{name}")
