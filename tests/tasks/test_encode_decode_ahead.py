"""Pictures are decoded ahead of the device, within bounds, and form the same batches."""

import queue
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from encoder_inputs import BUCKETS, SQUARE, gradient

from artifacts.image_shards import Sample
from artifacts.records import digest_bytes
from tasks.encode.crop_to_bucket import bucket_sizes
from tasks.encode.shard import ShardEncoder, decoded_batches


def _samples(count: int) -> list[Sample]:
    pictures = [gradient(60 + 20 * (n % 3), 60 + n) for n in range(count)]
    pictures[3] = b"<html>"
    return [
        Sample(f"{n:03}", data, "png", (f"caption {n % 2}",), {"sha256": digest_bytes(data)})
        for n, data in enumerate(pictures)
    ]


def _batches(threads: int) -> tuple[list[tuple[list[int], list[np.ndarray]]], Counter[str]]:
    settings, bad = replace(BUCKETS, flip=True), Counter[str]()
    with ThreadPoolExecutor(threads) as decoders:
        found = decoded_batches(
            _samples(25), settings, bucket_sizes(settings, 4), 3, decoders, 2 * threads, bad
        )
        return [([p.position for p in batch.pictures], batch.pixels) for batch in found], bad


def test_batches_do_not_depend_on_the_number_of_decoders() -> None:
    one, four = _batches(1), _batches(4)
    assert one[1] == four[1] == {"undecodable": 1}
    assert [positions for positions, _ in one[0]] == [positions for positions, _ in four[0]]
    assert sorted(n for positions, _ in one[0] for n in positions) == [*range(3), *range(4, 25)]
    for (_, first), (_, second) in zip(one[0], four[0], strict=True):
        assert len(first) == len(second)
        for plain, other in zip(first, second, strict=True):
            np.testing.assert_array_equal(plain, other)


def test_at_most_the_given_number_of_pictures_is_read_ahead() -> None:
    read = []

    def samples() -> Iterator[Sample]:
        for sample in _samples(40)[4:]:
            read.append(sample.key)
            yield sample

    buckets = bucket_sizes(SQUARE, 4)
    with ThreadPoolExecutor(2) as decoders:
        batches = decoded_batches(samples(), SQUARE, buckets, 4, decoders, 8, Counter())
        for number in range(1, 5):
            next(batches)
            assert len(read) <= 4 * number + 8


def test_each_bucket_keeps_at_most_a_batch_of_pictures() -> None:
    read, encoded = 0, 0

    def samples() -> Iterator[Sample]:
        nonlocal read
        for sample in _samples(40)[4:]:
            read += 1
            yield sample

    buckets = bucket_sizes(BUCKETS, 4)
    assert len(buckets) > 1
    with ThreadPoolExecutor(2) as decoders:
        for batch in decoded_batches(samples(), BUCKETS, buckets, 4, decoders, 8, Counter()):
            encoded += len(batch.pictures)
            assert read - encoded <= 8 + 3 * len(buckets)
    assert read == encoded == 36


class _WatchedLock:
    """A lock that records which thread asks for it."""

    def __init__(self, lock: threading.Lock, seen: queue.SimpleQueue[str]) -> None:
        self.lock, self.seen = lock, seen

    def __enter__(self) -> None:
        self.seen.put(f"{threading.current_thread().name} asks")
        self.lock.acquire()

    def __exit__(self, *_: object) -> None:
        self.lock.release()


class _SlowEncoder:
    """Waits in its first batch until `go` is set."""

    info = {  # noqa: RUF012
        "family": "sdxl",
        "size_step": 4,
        "vae_scale_factor": 4,
        "caption_tokens": 77,
    }
    limits = {"text_encoder": 77}  # noqa: RUF012

    def __init__(self) -> None:
        self.began, self.go = threading.Event(), threading.Event()
        self.seen: queue.SimpleQueue[str] = queue.SimpleQueue()
        self.order: list[str] = []

    def images(self, pixels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        self.seen.put(f"{threading.current_thread().name} encodes")
        self.began.set()
        assert self.go.wait(60)
        self.order.append(threading.current_thread().name)
        return (np.zeros((len(pixels), 4, 16, 16), np.float32),) * 2

    def texts(self, captions: list[str]) -> tuple[np.ndarray, None]:
        self.order.append(f"{threading.current_thread().name}: {', '.join(captions)}")
        return np.zeros((len(captions), 77, 8), np.float32), None

    def input_ids(self, captions: list[str]) -> np.ndarray:
        return np.zeros((len(captions), 1, 77), np.int64)

    def token_counts(self, captions: list[str]) -> dict[str, list[int]]:
        return {"text_encoder": [1] * len(captions)}


def test_the_next_shard_is_read_while_the_device_encodes(tmp_path: Path) -> None:
    """One shard has the device until all its pictures and captions are encoded."""
    device = _SlowEncoder()
    encoder = ShardEncoder(device, SQUARE, batch_size=4, decoders=1)
    encoder.device = _WatchedLock(encoder.device, device.seen)  # type: ignore[assignment]
    read = threading.Event()

    def samples() -> Iterator[Sample]:
        for number, sample in enumerate(_samples(12)):
            if number == 8:  # two batches ahead
                read.set()
            yield sample

    def encode(name: str, samples: Any) -> threading.Thread:
        path = tmp_path / name
        thread = threading.Thread(target=encoder.encode, args=(samples, path), name=name)
        thread.start()
        return thread

    first = encode("first", _samples(12))
    assert device.began.wait(60)
    second = encode("second", samples())
    assert read.wait(60), "nothing was read ahead"
    seen = [device.seen.get(timeout=60) for _ in range(3)]
    assert seen == ["first asks", "first encodes", "second asks"]
    device.go.set()
    for thread in (first, second):
        thread.join(60)
    captions = [": , caption 0, caption 1"]  # each once, whatever number of pictures has it
    assert device.order == [
        line for n in ("first", "second") for line in (*[n] * 3, *(n + c for c in captions))
    ]
