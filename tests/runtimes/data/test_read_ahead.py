"""Shards are fetched before they are needed, once per host, and in one order for all buckets."""

import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from waiting import wait_until

from artifacts.latent_shards import open_latents
from runtimes.data import shard_cache
from runtimes.data.sample_order import Order
from runtimes.data.shard_cache import ShardFiles

WriteLatents = Callable[..., str]


@pytest.fixture
def files(
    tmp_path: Path, own_cache: Path, write_latents: WriteLatents
) -> Callable[..., ShardFiles]:
    """`files(**more)`: six remote shards, as another process of this host sees them."""
    refs = open_latents(write_latents(f"memory://{tmp_path.name}", [{"train/8x8": 6}] * 6)).shards

    def made(room: int = 100) -> ShardFiles:
        return ShardFiles(refs, open_limit=8, cache_bytes=room * refs[0].size)

    return made


def watch(monkeypatch: pytest.MonkeyPatch, during: Callable[[], None] = lambda: None) -> Counter:
    """Downloads by URL."""
    fetched: Counter[str] = Counter()
    real = shard_cache._download

    def download(fs: object, path: str, *more: object) -> None:
        fetched[path] += 1
        during()
        real(fs, path, *more)  # type: ignore[arg-type]

    monkeypatch.setattr(shard_cache, "_download", download)
    return fetched


def test_shards_are_fetched_before_they_are_read(
    files: Callable[..., ShardFiles], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    fetched, ours = watch(monkeypatch), files()
    ours.read_ahead([4, 2])
    cache = tmp_path / "cache/kilnworks/shards"
    wait_until(lambda: len(list(cache.glob("*.safetensors"))) == 2)
    assert sum(fetched.values()) == 2
    assert ours[4].groups == ours[2].groups == {"train/8x8": 6}
    assert sum(fetched.values()) == 2
    ours.close()


def test_only_as_much_is_read_ahead_as_half_of_the_cache_holds(
    files: Callable[..., ShardFiles],
) -> None:
    ours, asked = files(room=5), []
    ours._fetch_ahead = asked.append  # type: ignore[method-assign]
    ours.read_ahead([0, 1, 2, 3, 4, 5])
    assert ours._ahead is not None
    wait_until(lambda: len(asked) == 2)
    ours.close()
    assert sorted(asked) == [0, 1]


def test_two_processes_of_a_host_fetch_a_shard_once(
    files: Callable[..., ShardFiles], monkeypatch: pytest.MonkeyPatch
) -> None:
    others: list[threading.Thread] = []

    def another_begins() -> None:
        if not others:
            others.append(threading.Thread(target=lambda: files()[3].close()))
            others[0].start()
            others[0].join(0.3)  # it waits for us

    fetched = watch(monkeypatch, another_begins)
    files()[3].close()
    others[0].join(60)
    assert list(fetched.values()) == [1]


def test_concurrent_downloads_share_the_room_of_the_cache(
    files: Callable[..., ShardFiles], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for number in (0, 1):
        files(room=2)[number].close()
    others: list[threading.Thread] = []

    def another_downloads() -> None:
        if not others:
            others.append(threading.Thread(target=lambda: files(room=2)[3].close()))
            others[0].start()
            others[0].join(60)

    watch(monkeypatch, another_downloads)
    files(room=2)[2].close()
    cache = tmp_path / "cache/kilnworks/shards"
    assert len(others) == 1
    assert len(list(cache.iterdir())) == 2


def test_all_buckets_need_the_same_shards_at_about_the_same_time() -> None:
    """Else a host would fetch each shard once per bucket."""
    groups = {f"train/{n}x8": 40 for n in range(5)}
    order = Order([groups] * 60, batch_size=8, seed=0, window=2)
    latest: list[int] = []  # shards in the order of their last use, as a cache of 20 keeps them
    fetched = 0
    for step in range(order.steps_before(1)):
        for place in order.batch(step):
            if place.shard in latest:
                latest.remove(place.shard)
            else:
                fetched += 1
            latest = [*latest[-19:], place.shard]
    assert fetched < 1.2 * 60


def test_a_window_is_read_with_the_next_one_also_across_epochs() -> None:
    order = Order([{"train/8x8": 4}] * 4, batch_size=4, seed=0, window=2)
    (first,), (second,) = order.windows(0), order.windows(2)
    ahead = order.shards(first)
    assert {place.shard for step in (0, 1) for place in order.batch(step)} == set(ahead[:2])
    assert {place.shard for step in (2, 3) for place in order.batch(step)} == set(ahead[2:])
    following = order.shards(second)
    assert following[:2] == ahead[2:]
    assert {place.shard for step in (4, 5) for place in order.batch(step)} == set(following[2:])
