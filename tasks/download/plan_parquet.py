"""Files of a plan: parquet with one row group per shard, and encrypted URLs.

A listed URL may have a signature or a password, and stores hold no secrets: the columns `url` and
`file` of a shard are encrypted (AES-GCM) with a key that stays in the local cache.
"""

from __future__ import annotations

import base64
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from fsspec.core import url_to_fs

from artifacts.models import cache_folder
from artifacts.records import digest_bytes, distrust
from artifacts.remote_stores import caching
from tasks.download.list_files import reading
from tasks.download.row_fields_and_hash import HASHED
from tasks.download.stage_errors import SourceError

SECRET = ["url", "file"]
#: The column of the encrypted ones: their Arrow stream is in the first row of a shard.
SEALED = pa.field("sealed", pa.binary())
#: Row groups of a file: a reader of one parses the description of all.
GROUPS = 128
NONCE = 12  # bytes
#: Codec of each column with redundancy: hashes and encrypted bytes have none.
CODECS = dict.fromkeys(["captions.list.element", "sha256", "additional"], "zstd")


class PlanWriter:
    """Writes row groups to the files `0.parquet`, `1.parquet`... of a folder."""

    def __init__(self, folder: Path, key: str) -> None:
        self.folder, self.key = folder, key
        self.files: list[str] = []
        self._writer: Any = None
        self._groups = 0

    def seal(self, shard: pa.Table) -> bytes:
        """The encrypted columns of a shard; may be called in another thread than `write`."""
        return _sealed(shard.select(SECRET), self.key)

    def write(self, shard: pa.Table, sealed: bytes) -> tuple[str, int]:
        """Write a shard's rows of HASHED; returns the name of its file and the row group.

        Args:
            sealed: of `seal`.
        """
        first, rest = pa.array([sealed], SEALED.type), pa.nulls(len(shard) - 1, SEALED.type)
        table = shard.drop_columns(SECRET).append_column(SEALED, pa.chunked_array([first, rest]))
        if self._writer is None or self._groups == GROUPS:
            self._open(table.schema)
        self._writer.write_table(table, row_group_size=len(shard))
        self._groups += 1
        return Path(self.files[-1]).name, self._groups - 1

    def close(self) -> None:
        """Finish the last file."""
        if self._writer is not None:
            self._writer.close()

    def _open(self, schema: pa.Schema) -> None:
        self.close()
        path = str(self.folder / f"{len(self.files)}.parquet")
        self._writer = pq.ParquetWriter(
            path,
            schema,
            compression=CODECS,
            use_dictionary=False,
            write_statistics=False,
            write_page_checksum=True,
        )
        self.files.append(path)
        self._groups = 0


def read_group(file: str, group: int, key: str) -> pa.Table:
    """The rows of HASHED of one row group. Raises SourceError if it cannot be read."""
    with _reading(file) as parquet:
        table = parquet.read_row_group(group, use_threads=False)
    try:
        opened = _opened(table[SEALED.name][0].as_py(), key)
    except InvalidTag:
        raise SourceError(f"source: {file} has another machine's key: run again") from None
    for name in SECRET:
        table = table.append_column(name, opened[name])
    return table.select(HASHED.names)


def read_hashes(file: str, group: int) -> list[bytes]:
    """The hash of each row of one row group, which needs no key. Raises SourceError."""
    with _reading(file) as parquet:
        table = parquet.read_row_group(group, columns=["hash"], use_threads=False)
    return list(table["hash"].to_pylist())


@contextmanager
def _reading(file: str) -> Iterator[pq.ParquetFile]:
    try:
        with reading(file), fsspec.open(file, "rb") as stream:
            yield pq.ParquetFile(stream, pre_buffer=False, page_checksum_verification=True)
    except SourceError:
        distrust_file(file)
        raise


def distrust_file(file: str) -> None:
    """Have the next run check a file of a plan, which is built again if it is damaged."""
    distrust(*url_to_fs(file))


def plan_key() -> str:
    """The key (base64) of this machine's plans; made once, and readable by its owner only.

    Raises SourceError if it is damaged.
    """
    path = cache_folder() / "plan.key"
    if not path.exists():
        with caching(path.parent):
            _write_key(path)
    key = path.read_text(errors="replace")
    try:
        _cipher(key)
    except ValueError:
        raise SourceError(f"source: the key {path} is damaged: delete it") from None
    return key


def _write_key(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with NamedTemporaryFile(dir=path.parent) as beside:  # mode 600
        beside.write(base64.b64encode(AESGCM.generate_key(256)))
        beside.flush()
        os.fsync(beside.fileno())
        with suppress(FileExistsError):  # another process was first
            os.link(beside.name, path)


def key_id(key: str) -> str:
    """A name of a key that does not disclose it."""
    return digest_bytes(f"plan {key}".encode())[:16]


def _sealed(table: pa.Table, key: str) -> bytes:
    sink, packed = pa.BufferOutputStream(), pa.ipc.IpcWriteOptions(compression="zstd")
    with pa.ipc.new_stream(sink, table.schema, options=packed) as stream:
        stream.write_table(table.combine_chunks())
    nonce = os.urandom(NONCE)
    return nonce + _cipher(key).encrypt(nonce, sink.getvalue().to_pybytes(), None)


def _opened(data: bytes, key: str) -> pa.Table:
    return pa.ipc.open_stream(_cipher(key).decrypt(data[:NONCE], data[NONCE:], None)).read_all()


def _cipher(key: str) -> AESGCM:
    return AESGCM(base64.b64decode(key))
