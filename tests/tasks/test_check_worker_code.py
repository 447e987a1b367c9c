"""A worker with other code or packages than the flow builds no shard."""

import pytest

from tasks.check_worker_code import WorkerDiffers, check_versions, versions


def test_equal_workers_are_accepted() -> None:
    check_versions(dict(versions()))
    assert {"Kilnworks", "torch", "img2dataset", "opencv-python-headless"} <= versions().keys()


@pytest.mark.parametrize(
    ("flows", "words"),
    [
        ({"torch": "1.0"}, r"has torch \S+, the flow 1\.0"),
        ({"Kilnworks": "aaaa"}, r"has Kilnworks \w{12}, the flow aaaa"),
        ({"faiss": "1.9"}, "has faiss None, the flow 1.9"),
    ],
)
def test_a_difference_is_named(flows: dict[str, str], words: str) -> None:
    with pytest.raises(WorkerDiffers, match=words):
        check_versions({**versions(), **flows})
