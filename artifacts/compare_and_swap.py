"""Compare-and-swap of one small file, on a local disk, NFS, S3, Google Cloud Storage or in memory.

A local file `lock.json` is a chain: each state is a file of its own, `lock.json.1`, `lock.json.2`,
..., and the highest number is the present state. link(2) creates the next number for one process
alone, on NFS too. An object store compares its own ETag or generation. So a process that was paused
for hours still loses against any change that others made during the pause.
"""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from fsspec import AbstractFileSystem
from fsspec.asyn import sync
from fsspec.implementations.local import LocalFileSystem
from fsspec.implementations.memory import MemoryFileSystem

from artifacts import filesystems
from artifacts.filesystems import protocols
from configs.errors import Refused

#: What S3 answers to a conditional write that lost.
_LOST = {"PreconditionFailed", "ConditionalRequestConflict", "NoSuchKey", "412", "409"}


@dataclass(frozen=True)
class VersionedContent:
    """What a file held when it was read."""

    data: bytes | None  # None: there is no file
    version: Any  # number, ETag or generation; the store compares it


def read(fs: AbstractFileSystem, path: str) -> VersionedContent:
    """The present state of the file at `path`. Raises Refused, or as the filesystem does."""
    return _swapper(fs).read(path)


def swap(
    fs: AbstractFileSystem, path: str, seen: VersionedContent, data: bytes
) -> VersionedContent | None:
    """Replace the state `seen` by `data`; None if the present state is another.

    An answer can be lost and the request repeated, so a refusal is checked against what is there.
    `data` must therefore differ from what any other process writes. None may also mean that `data`
    was written and then replaced. A caller that must know puts a unique token into `data` and looks
    for it.

    Raises Refused, or as the filesystem does.
    """
    swapper = _swapper(fs)
    version = swapper.write(path, seen, data)
    if version is not None:
        return VersionedContent(data, version)
    state = swapper.read(path)
    return state if state.data == data else None


def create(fs: AbstractFileSystem, path: str, data: bytes) -> bool:
    """Create a plain file, whole and synced; False if another file is there already."""
    if isinstance(fs, LocalFileSystem):
        filesystems.make_folder(os.path.dirname(path))
        return filesystems.create(path, data)
    return swap(fs, path, VersionedContent(None, None), data) is not None


def remove(
    fs: AbstractFileSystem, path: str, is_meant: Callable[[bytes], bool] = lambda data: True
) -> bytes | None:
    """Delete a plain file and return its bytes; None if it is gone or has been replaced.

    Args:
        is_meant: called with what the file holds; if False, the file stays, and None is returned.

    A request that arrives late deletes no newer file. If two processes delete a file at the same
    time, both may get its bytes: an answer can be lost, too.

    Raises Refused, or as the filesystem does.
    """
    if isinstance(fs, LocalFileSystem):
        file = Path(path)
        try:
            data = file.read_bytes()
        except FileNotFoundError:
            return None
        if not is_meant(data):
            return None
        file.unlink(missing_ok=True)
        return data
    swapper = _swapper(fs)
    seen = swapper.read(path)
    if seen.data is None or not is_meant(seen.data):
        return None
    deleted = swapper.delete(path, seen) or swapper.read(path).data is None
    return seen.data if deleted else None


def remove_checked(fs: AbstractFileSystem, path: str, check: Callable[[], None]) -> bool:
    """Delete a plain file as `remove`; False if it is gone or has been replaced.

    Args:
        check: called before and after. If it raises after a pause, another process may already rely
            on the file, which is created again unless that process wrote its own.
    """
    check()
    data = remove(fs, path)
    if data is None:
        return False
    try:
        check()
    except Exception:
        create(fs, path, data)
        raise
    return True


class _Swapper(Protocol):
    def read(self, path: str) -> VersionedContent: ...

    def delete(self, path: str, seen: VersionedContent) -> bool:
        """Delete a file whose state is `seen`; False if the store refused."""

    def write(self, path: str, seen: VersionedContent, data: bytes) -> Any:
        """The new version; None if the store refused. Raises FileNotFoundError without a bucket."""


def _swapper(fs: AbstractFileSystem) -> _Swapper:
    if isinstance(fs, LocalFileSystem):
        return _Local()
    if isinstance(fs, MemoryFileSystem):
        return _Memory(fs)
    known = protocols(fs)
    if "s3" in known:
        return _S3(fs)
    if "gs" in known:
        return _Gcs(fs)
    name = "://, ".join(sorted(known))
    raise Refused(f"{name}:// has no conditional writes here: use a local folder, s3:// or gs://")


class _Local:
    def read(self, path: str) -> VersionedContent:
        while numbers := self._numbers(path):
            with suppress(FileNotFoundError), open(f"{path}.{numbers[-1]}", "rb") as stream:
                return VersionedContent(stream.read(), numbers[-1])
        return VersionedContent(None, 0)

    def write(self, path: str, seen: VersionedContent, data: bytes) -> int | None:
        number = seen.version + 1
        try:
            if not filesystems.create(f"{path}.{number}", data):
                return None
        except FileNotFoundError:  # the folder has been deleted
            return None
        # The newest file stays until a higher one exists. If others had already removed `number`
        # as outdated, a higher number is therefore here, and this file never counts.
        numbers = self._numbers(path)
        if not numbers:  # the folder has been deleted since
            return None
        *outdated, newest = numbers
        for old in outdated:
            with suppress(FileNotFoundError):
                os.unlink(f"{path}.{old}")
        return number if newest == number else None

    def delete(self, path: str, seen: VersionedContent) -> bool:
        raise NotImplementedError("a plain local file has no states")

    def _numbers(self, path: str) -> list[int]:
        folder, name = os.path.split(path)
        try:
            names = os.listdir(folder)
        except FileNotFoundError:
            return []
        pattern = re.compile(rf"{re.escape(name)}\.(\d+)")
        return sorted(int(match[1]) for entry in names if (match := pattern.fullmatch(entry)))


class _Memory:
    _alone = threading.Lock()

    def __init__(self, fs: MemoryFileSystem) -> None:
        self._fs = fs

    def read(self, path: str) -> VersionedContent:
        try:
            data = self._fs.cat_file(path)
        except FileNotFoundError:
            return VersionedContent(None, None)
        return VersionedContent(data, data)

    def write(self, path: str, seen: VersionedContent, data: bytes) -> bytes | None:
        with self._alone:
            if self.read(path).version != seen.version:
                return None
            self._fs.pipe_file(path, data)
            return data

    def delete(self, path: str, seen: VersionedContent) -> bool:
        with self._alone:
            is_same = self.read(path).version == seen.version
            if is_same:
                self._fs.rm_file(path)
            return is_same


class _S3:
    def __init__(self, fs: Any) -> None:
        self._fs = fs

    def read(self, path: str) -> VersionedContent:
        try:
            data, etag = sync(self._fs.loop, self._get, path)
        except FileNotFoundError:
            return VersionedContent(None, None)
        return VersionedContent(data, etag)

    async def _get(self, path: str) -> tuple[bytes, str]:
        bucket, key, _ = self._fs.split_path(path)
        answer = await self._fs._call_s3("get_object", Bucket=bucket, Key=key)
        async with answer["Body"] as stream:
            return await stream.read(), answer["ETag"]

    def write(self, path: str, seen: VersionedContent, data: bytes) -> str | None:
        condition = {"IfNoneMatch": "*"} if seen.version is None else {"IfMatch": seen.version}
        answer = self._ask("put_object", path, Body=data, **condition)
        return None if answer is None else str(answer["ETag"])

    def delete(self, path: str, seen: VersionedContent) -> bool:
        return self._ask("delete_object", path, IfMatch=seen.version) is not None

    def _ask(self, request: str, path: str, **arguments: Any) -> dict[str, Any] | None:
        """What S3 answers; None if it refuses because the request's condition does not hold."""
        bucket, key, _ = self._fs.split_path(path)
        try:
            return dict(self._fs.call_s3(request, Bucket=bucket, Key=key, **arguments))
        except OSError as error:
            reply = getattr(error.__cause__, "response", {}).get("Error", {})
            if reply.get("Code") in _LOST:
                return None
            raise


class _Gcs:
    def __init__(self, fs: Any) -> None:
        self._fs = fs

    def read(self, path: str) -> VersionedContent:
        try:
            headers, data = self._fs.call("GET", self._fs.url(path))
        except FileNotFoundError:
            return VersionedContent(None, None)
        return VersionedContent(data, headers["X-Goog-Generation"])

    def write(self, path: str, seen: VersionedContent, data: bytes) -> str | None:
        bucket, key, _ = self._fs.split_path(path)
        try:
            answer = self._fs.call(
                "POST",
                f"{self._fs._location}/upload/storage/v1/b/{bucket}/o",
                name=key,
                uploadType="media",
                ifGenerationMatch=seen.version or 0,  # 0: there is no object
                headers={"Content-Type": "application/octet-stream"},
                data=data,
                json_out=True,
            )
        except FileExistsError:
            return None
        except FileNotFoundError:
            if seen.version is None:  # there is no bucket, so another try would fail, too
                raise
            return None
        return str(answer["generation"])

    def delete(self, path: str, seen: VersionedContent) -> bool:
        bucket, key, _ = self._fs.split_path(path)
        try:
            self._fs.call("DELETE", "b/{}/o/{}", bucket, key, ifGenerationMatch=seen.version)
        except (FileExistsError, FileNotFoundError):
            return False
        return True
