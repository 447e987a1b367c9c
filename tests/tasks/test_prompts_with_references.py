"""Prompts that see references are encoded once by caption and pictures, and train end to end."""

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from picture_bytes import noise_picture
from PIL import Image
from referenced_data import (
    counted,
    data_set_source,
    encoded,
    recipe_of,
    target_shards,
    write_data_set,
)

from artifacts.latent_shards import (
    LatentScale,
    LatentShard,
    from_bfloat16,
    open_latents,
    to_bfloat16,
)
from artifacts.records import digest_bytes
from runtimes.data.loader import BatchReader, Loader
from runtimes.families import FAMILIES
from runtimes.objective.noise_schedule import NoiseSchedule
from runtimes.objective.training_objective import Objective
from runtimes.pipeline_folder.folder import Base
from runtimes.torch_models.vae_text_encoders import Encoder

pytestmark = pytest.mark.slow
REFERENCES = [noise_picture(1000 + n, 24, 32) for n in range(4)]
TARGETS = [noise_picture(number, 16, 16) for number in range(12)]


@contextmanager
def prompts_counted(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counter[int]]:
    """Counts the prompts that are encoded within, by their number of references."""
    count: Counter[int] = Counter()
    own = Encoder.texts_with_pictures

    def counting(self: Encoder, captions: Sequence[str], pictures: Sequence[Any]) -> Any:
        count.update(map(len, pictures))
        return own(self, captions, pictures)

    with monkeypatch.context() as patch:
        patch.setattr(Encoder, "texts_with_pictures", counting)
        yield count


def rows_of(references: Sequence[bytes]) -> list[tuple[bytes, str, list[bytes]]]:
    """Target n has caption n % 2 and reference n % 3; the last two have none, and two."""
    rows = [(data, f"caption {n % 2}", [references[n % 3]]) for n, data in enumerate(TARGETS[:-2])]
    return [*rows, (TARGETS[-2], "caption 0", []), (TARGETS[-1], "caption 0", [*references[:2]])]


def test_a_prompt_is_encoded_once_and_again_with_another_reference_alone(
    tiny_qwen_image_edit: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_data_set(tmp_path / "data.parquet", rows_of(REFERENCES[:3]))
    recipe = recipe_of(tmp_path / "store", tiny_qwen_image_edit, data_set_source(path))
    with prompts_counted(monkeypatch) as count:
        latents = encoded(recipe)
    assert count == {1: 3 * (2 + 1), 0: 1 + 1, 2: 1 + 1}, "captions, and the empty one"

    changed = [*REFERENCES[:2], REFERENCES[3]]
    write_data_set(path, rows_of(changed))
    with prompts_counted(monkeypatch) as count, counted(monkeypatch) as pictures:
        again = encoded(recipe)
    assert count == {1: 2 + 1}, "the prompts that see the changed reference"
    assert pictures == {"32x24": 1}, "this reference, and no target"
    assert target_shards(again) == target_shards(latents)

    with prompts_counted(monkeypatch) as count, counted(monkeypatch) as pictures:
        write_data_set(path, rows_of([changed[1], changed[0], changed[2]]))
        encoded(recipe)
    assert count == {2: 2} and not pictures, "two references in another order"


def test_a_batch_has_the_prompts_of_its_samples(tiny_qwen_image_edit: Path, tmp_path: Path) -> None:
    """A dropped caption is the empty one with the same references."""
    path = write_data_set(tmp_path / "data.parquet", rows_of(REFERENCES[:3]))
    recipe = recipe_of(tmp_path / "store", tiny_qwen_image_edit, data_set_source(path))
    latents = open_latents(encoded(recipe).uri)
    encoder = Encoder(Base.open(tiny_qwen_image_edit))
    named = {
        bytes.fromhex(digest_bytes(data)): (text, own) for data, text, own in rows_of(REFERENCES)
    }

    def expected(caption: str, references: Sequence[bytes]) -> np.ndarray:
        images = [Image.open(BytesIO(data)).convert("RGB") for data in references]
        seen = [encoder.family.condition_picture(image) for image in images]
        [embeds] = encoder.texts_with_pictures([caption], [seen])
        return from_bfloat16(to_bfloat16(embeds))

    schedule = NoiseSchedule.from_config({"beta_schedule": "scaled_linear"})
    objective = Objective(schedule, LatentScale(0.5), seed=3, caption_dropout_rate=0.4)
    reader = BatchReader(latents, FAMILIES["qwen_image_edit"], objective)
    loader = Loader(reader, batch_size=1, seed=3, window=2)
    shards = [LatentShard(ref.url) for ref in latents.shards]
    dropped = 0
    for step in range(10):
        [place] = loader.order.batch(step)
        ref = latents.shards[place.shard]
        stored = place.group.partition("+")[0]
        sample = shards[place.shard].sample(stored, ref.stored_row(place.group, place.row))
        text, references = named[sample.id]
        [choices] = objective.choices([step], [])
        dropped += choices.dropped
        inputs = loader.batch(step).conditioning
        wanted = expected("" if choices.dropped else text, references)
        found = inputs["prompt_embeds"][0, : len(wanted)]
        np.testing.assert_array_equal(found, wanted)
        assert inputs["prompt_embeds_mask"].sum() == len(wanted)
        assert sum(name.startswith("reference_") for name in inputs) == len(references)
    assert 0 < dropped < 10
