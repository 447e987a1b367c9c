"""Image shards: tars of pictures, captions and metadata."""

from __future__ import annotations

import tarfile
from pathlib import Path
from random import Random

from fuzz.mutations import encode, mutate, mutate_tree
from fuzz.reader import Reader

from artifacts.image_shards import Sample, add_member, read_tar, write_tar
from artifacts.records import Damaged, digest_bytes

META = {"url": "http://h/a", "caption": "a", "width": 4, "captions": ["a", "b"], "sha256": "0"}


def readers(folder: Path) -> list[Reader]:
    path = folder / "shard.tar"
    samples = [
        Sample("0001", b"picture one", "jpg", ("a cat", "é"), {"width": 4}),
        Sample("0002", b"picture two" * 60, "jpg", ("a dog",), {"url": "http://h/b"}),
        Sample("0003", b"", "jpg", ("",), {}),
    ]
    write_tar(path, samples)
    valid = path.read_bytes()
    sha256 = digest_bytes(valid)

    def tar(rng: Random) -> bool:
        if rng.randrange(4):
            path.write_bytes(mutate(valid, rng))
        else:
            _forge(path, rng)
        try:
            for sample in read_tar(path):
                assert isinstance(sample.image, bytes) and isinstance(sample.meta, dict)
                assert sample.captions and all(isinstance(c, str) for c in sample.captions)
        except ValueError:
            return False
        return True

    def checked(rng: Random) -> bool:
        """As the next stage reads it: the sha256 is recorded, so other bytes are damage."""
        data = mutate(valid, rng)
        path.write_bytes(data)
        try:
            found = list(read_tar(str(path), sha256))
        except Damaged:
            return False
        assert data == valid and len(found) == 3, "a damaged tar was accepted"
        return True

    return [Reader("image tar", 10, tar), Reader("image tar, sha256", 5, checked)]


def _forge(path: Path, rng: Random) -> None:
    """A tar that another program wrote: members are whole, their content is anything."""
    formats = (tarfile.GNU_FORMAT, tarfile.PAX_FORMAT)
    with tarfile.open(path, "w", format=rng.choice(formats)) as tar:
        add_member(tar, "0001.jpg", b"picture")
        add_member(tar, "0001.json", encode(mutate_tree(META, rng), rng))
        name = rng.choice(("0001.txt", "0002.jpg", "0002.txt", "x" * 120 + ".jpg", "é.png", ".."))
        add_member(tar, name, mutate(b"a caption", rng))
        if rng.randrange(4) == 0:
            member = tarfile.TarInfo("0003.jpg")
            member.type = rng.choice((tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.DIRTYPE, b"S"))
            member.linkname = rng.choice(("0001.jpg", "/etc/passwd", "../x", "0003.jpg", ""))
            tar.addfile(member)
