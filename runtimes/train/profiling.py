"""A trace of some steps of a run, kept in `<work>/profile`."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem

from configs.training import Profile
from runtimes.contract import Runtime


class Profiling:
    """Traces `steps` steps from step `start` (from 0) on, unless the run resumes after that."""

    def __init__(self, settings: Profile, work: str, runtime: Runtime) -> None:
        self._start, self._end = settings.start, settings.start + settings.steps
        self._work, self._runtime = work, runtime
        self._tracing = ExitStack()

    def changes(self, step: int) -> bool:
        """Whether a trace starts or ends before this step."""
        return self._start < self._end and step in (self._start, self._end)

    def before(self, step: int) -> None:
        """Start or end the trace."""
        if step == self._end:
            self.close()
        elif step == self._start:
            folder = self._tracing.enter_context(_folder_below(self._work))
            self._tracing.enter_context(self._runtime.profile(folder))

    def close(self) -> None:
        """End the trace, if it has not ended."""
        self._tracing.close()


@contextmanager
def _folder_below(work: str) -> Iterator[str]:
    """A local folder whose files are in `<work>/profile` at the end."""
    fs, root = url_to_fs(work)
    target = f"{root.rstrip('/')}/profile"
    if isinstance(fs, LocalFileSystem):
        fs.makedirs(target, exist_ok=True)
        yield target
        return
    with tempfile.TemporaryDirectory(prefix="kiln-profile-") as folder:
        yield folder
        for path in sorted(p for p in Path(folder).rglob("*") if p.is_file()):
            name = path.relative_to(folder).as_posix()
            fs.makedirs(f"{target}/{name}".rpartition("/")[0], exist_ok=True)
            fs.put_file(str(path), f"{target}/{name}")
