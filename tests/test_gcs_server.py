"""The tests' Google Cloud Storage keeps what the real clients rely on: generations, conditions."""

import os
from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

import pytest
from fsspec.core import url_to_fs
from gcs_server import GcsServer
from google.api_core.client_options import ClientOptions
from google.api_core.exceptions import NotFound, NotModified, PreconditionFailed
from google.auth.credentials import AnonymousCredentials
from google.cloud.storage import Bucket, Client

pytestmark = pytest.mark.slow


@pytest.fixture
def bucket(gcs: GcsServer) -> Iterator[Bucket]:
    """A bucket of the test's own, by Google's own client."""
    options = ClientOptions(api_endpoint=gcs.url)
    with Client("project", AnonymousCredentials(), client_options=options) as client:
        yield client.bucket(uuid4().hex)


def test_an_object_is_created_once(bucket: Bucket) -> None:
    bucket.blob("lock").upload_from_string("mine", if_generation_match=0)
    with pytest.raises(PreconditionFailed):
        bucket.blob("lock").upload_from_string("yours", if_generation_match=0)
    assert bucket.blob("lock").download_as_bytes() == b"mine"
    bucket.blob("lock").delete()
    bucket.blob("lock").upload_from_string("yours", if_generation_match=0)
    assert bucket.blob("lock").download_as_bytes() == b"yours"


def test_a_change_is_made_to_the_generation_that_was_read_alone(bucket: Bucket) -> None:
    old, new = bucket.blob("a"), bucket.blob("a")
    old.upload_from_string("1")
    new.upload_from_string("2", if_generation_match=old.generation)
    assert new.generation > old.generation
    for change in (
        lambda: bucket.blob("a").upload_from_string("3", if_generation_match=old.generation),
        lambda: bucket.blob("a").upload_from_string("3", if_generation_not_match=new.generation),
        lambda: bucket.blob("a").delete(if_generation_match=old.generation),
        lambda: bucket.blob("b").upload_from_string("3", if_generation_match=old.generation),
        lambda: bucket.blob("b").upload_from_string("3", if_generation_not_match=0),
        lambda: bucket.blob("b").compose([new], if_generation_match=1),
        lambda: bucket.blob("b").compose([new], if_source_generation_match=[old.generation]),
        lambda: bucket.blob("b").rewrite(new, if_generation_match=1),
        lambda: bucket.blob("b").rewrite(new, if_source_generation_match=old.generation),
    ):
        with pytest.raises(PreconditionFailed):
            change()
    assert [(blob.name, blob.generation) for blob in bucket.list_blobs()] == [("a", new.generation)]
    with pytest.raises(NotFound):
        bucket.blob("a", generation=old.generation).download_as_bytes()
    bucket.blob("a").delete(if_generation_match=new.generation)
    assert not bucket.blob("a").exists()


@pytest.mark.soak
def test_what_the_asker_has_is_not_sent_again(bucket: Bucket) -> None:
    blob = bucket.blob("a")
    blob.upload_from_string("1")
    with pytest.raises(NotModified):
        blob.reload(if_generation_not_match=blob.generation)
    blob.reload(if_generation_not_match=blob.generation - 1)


@pytest.mark.soak
def test_metadata_of_an_object_has_its_own_generation(bucket: Bucket) -> None:
    blob = bucket.blob("a")
    blob.upload_from_string("1")
    generation = blob.generation
    blob.metadata = {"who": "me"}
    blob.patch(if_metageneration_match=1)
    assert (blob.generation, blob.metageneration) == (generation, 2)
    with pytest.raises(PreconditionFailed):
        blob.delete(if_metageneration_match=1)
    with pytest.raises(PreconditionFailed):
        blob.delete(if_metageneration_not_match=2)
    assert bucket.get_blob("a").metadata == {"who": "me"}


@pytest.mark.soak
def test_a_composed_object_has_no_md5(bucket: Bucket) -> None:
    parts = [bucket.blob(name) for name in ("a", "b")]
    for part in parts:
        part.upload_from_string(part.name)
    whole = bucket.blob("whole")
    whole.compose([*parts, *parts])
    assert whole.download_as_bytes() == b"abab"
    assert whole.md5_hash is None and whole.component_count == 4
    copy = bucket.blob("copy")
    copy.rewrite(whole)
    assert copy.crc32c == whole.crc32c and copy.md5_hash is None


@pytest.mark.soak
def test_a_listing_comes_in_pages_of_objects_and_folders(bucket: Bucket) -> None:
    for name in ("a/1", "a/2", "a/b/3", "a/b/4", "a/c", "a0", "z"):
        bucket.blob(name).upload_from_string("x")
    pages = [
        ([blob.name for blob in page], sorted(page.prefixes))
        for page in bucket.list_blobs(prefix="a/", delimiter="/", page_size=2).pages
    ]
    assert pages == [(["a/1", "a/2"], []), (["a/c"], ["a/b/"])]
    every = [blob.name for blob in bucket.list_blobs(page_size=3)]
    assert every == ["a/1", "a/2", "a/b/3", "a/b/4", "a/c", "a0", "z"]
    assert [b.name for b in bucket.list_blobs(start_offset="a/b", end_offset="b")] == every[2:6]


@pytest.mark.soak
def test_a_large_file_goes_up_in_pieces_and_comes_back(gcs: GcsServer, tmp_path: Path) -> None:
    fs, root = url_to_fs("gs://large/files")
    data = os.urandom(6 * 2**20)
    (tmp_path / "up").write_bytes(data)
    fs.put_file(str(tmp_path / "up"), f"{root}/put", chunksize=2**21)
    with fs.open(f"{root}/written", "wb", block_size=2**20) as stream:
        stream.write(data)
    fs.cp_file(f"{root}/put", f"{root}/copied")
    for name in ("put", "written", "copied"):
        fs.get_file(f"{root}/{name}", str(tmp_path / "down"))
        assert (tmp_path / "down").read_bytes() == data, name
    assert fs.cat_file(f"{root}/put", start=2**20, end=2**20 + 9) == data[2**20 : 2**20 + 9]
    assert gcs.uploads == {}


@pytest.mark.soak
def test_a_large_upload_to_an_existing_object_is_refused(gcs: GcsServer) -> None:
    fs, root = url_to_fs("gs://large/twice")
    for size, chunk in ((10, 2**18), (2**19, 2**18)):
        path = f"{root}/{size}"
        fs.pipe_file(path, b"1" * size, mode="create", chunksize=chunk)
        with pytest.raises(FileExistsError):
            fs.pipe_file(path, b"2" * size, mode="create", chunksize=chunk)
        assert fs.cat_file(path) == b"1" * size


def test_what_is_forbidden_is_refused(gcs: GcsServer, monkeypatch: pytest.MonkeyPatch) -> None:
    fs, root = url_to_fs("gs://locked/a")
    fs.pipe_file(root, b"1")
    monkeypatch.setattr(gcs, "forbidden", "^(POST|DELETE) ")
    for change in (lambda: fs.pipe_file(root, b"2"), lambda: fs.rm_file(root)):
        with pytest.raises(OSError, match="Forbidden"):
            change()
    assert fs.cat_file(root) == b"1"
