"""Encoding needs the memory of one shard, whatever their number."""

import json
import shutil
from pathlib import Path

import pytest
from encode_stage import images_of, picture_of
from kiln_command import python

from artifacts.store import Store

HELPERS = Path(__file__).parents[1]
PEAK = """
import json, sys
sys.path[:0] = json.loads(sys.argv[1])
from encode_stage import encode_images, encode_recipe
from pathlib import Path
from artifacts.store import Store
store, model = sys.argv[2:4]
images = Store(store).load("download", sys.argv[4])
encode_images(encode_recipe(store, Path(model), batch_size=8), images)
# not ru_maxrss, which a child inherits from whoever started it
print(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0])
"""


@pytest.mark.soak
def test_memory_does_not_grow_with_the_dataset(tiny_sdxl: Path, tmp_path: Path) -> None:
    peaks = []
    for count in (2, 20):  # 13 and 130 MB of pictures: kept, they would show
        store = tmp_path / f"store{count}"
        shards = [
            {f"{s:02}{i}": (picture_of(100 * s + i, 720, 500), ("a",)) for i in range(6)}
            for s in range(count)
        ]
        images = images_of(Store(str(store)), shards, tmp_path)
        arguments = [json.dumps([str(HELPERS)]), str(store), str(tiny_sdxl), images.key]
        done = python("-c", PEAK, *arguments)
        peaks.append(int(done.stdout.split()[-1]))
        shutil.rmtree(store)
    assert peaks[1] < 1.15 * peaks[0], peaks
