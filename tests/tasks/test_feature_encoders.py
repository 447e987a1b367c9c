"""CLIP features and judges equal those of the models."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from picture_bytes import encode_picture
from PIL import Image
from torchmetrics.multimodal.clip_score import CLIPScore
from transformers import (
    AutoImageProcessor,
    AutoModel,
    BertConfig,
    BitImageProcessor,
    CLIPImageProcessor,
    CLIPModel,
    CLIPProcessor,
    CLIPTokenizer,
    ConvNextConfig,
    ConvNextImageProcessor,
    ConvNextModel,
    Dinov2Config,
    Dinov2Model,
    HieraConfig,
    HieraModel,
    PoolFormerConfig,
    PoolFormerImageProcessor,
    PoolFormerModel,
    SiglipConfig,
    SiglipImageProcessor,
    SiglipModel,
    ViTConfig,
    ViTForImageClassification,
    ViTImageProcessor,
    ViTMAEConfig,
    ViTMAEModel,
)

from artifacts.models import digest_model
from configs.errors import Refused
from configs.load_recipe import load_recipe
from configs.settings.evaluate import PreferenceModel
from demo import captions, dataset
from demo.captions import NEW_STYLE, style_index
from tasks.evaluate.features import (
    Clip,
    Pixels,
    VisionModel,
    check_clip,
    check_image_encoder,
    digest_image_encoder,
    open_image_encoder,
)
from tasks.evaluate.judges import clip_scores, cosine, judge_names, judge_pictures, open_judges
from tasks.evaluate.metrics import SampleScorer
from tasks.evaluate.stage import check

PROMPTS = ["a cat", "two dogs", "a cat", "words " * 40]


@pytest.fixture
def pictures() -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    sizes = [(32, 32), (40, 50), (64, 32), (32, 32)]
    return [rng.integers(0, 256, (*size, 3), np.uint8) for size in sizes]


def test_clip_score_equals_that_of_transformers(
    tiny_clip: Path, pictures: list[np.ndarray]
) -> None:
    clip = Clip(tiny_clip, "cpu")
    ours = clip_scores(clip.images(pictures), clip.texts(PROMPTS))
    model = CLIPModel.from_pretrained(tiny_clip).eval()
    tokens = CLIPTokenizer.from_pretrained(tiny_clip)(
        PROMPTS, padding=True, truncation=True, max_length=77, return_tensors="pt"
    )
    processor = CLIPImageProcessor.from_pretrained(tiny_clip)
    pixels = processor([Image.fromarray(p) for p in pictures], return_tensors="pt").pixel_values
    with torch.no_grad():
        logits = model(pixel_values=pixels, **tokens).logits_per_image
        cosine = (logits / model.logit_scale.exp()).diag().numpy()
    np.testing.assert_allclose(ours, 100 * np.maximum(cosine, 0), atol=2e-4)
    assert np.abs(cosine).max() > 0.01


class _FeatureTensors(CLIPModel):
    """Transformers 5 returns an object with the features, and torchmetrics expects a tensor."""

    def get_image_features(self, *args: Any, **kwargs: Any) -> Any:
        return super().get_image_features(*args, **kwargs).pooler_output

    def get_text_features(self, *args: Any, **kwargs: Any) -> Any:
        return super().get_text_features(*args, **kwargs).pooler_output


def test_clip_score_equals_that_of_torchmetrics(
    tiny_clip: Path, pictures: list[np.ndarray]
) -> None:
    def model_and_processor() -> tuple[CLIPModel, CLIPProcessor]:
        image, text = CLIPImageProcessor, CLIPTokenizer
        parts = (one.from_pretrained(tiny_clip) for one in (image, text))
        return _FeatureTensors.from_pretrained(tiny_clip), CLIPProcessor(*parts)

    theirs = CLIPScore(model_and_processor)
    tensors = [torch.from_numpy(one.copy()).permute(2, 0, 1) for one in pictures]
    theirs.update(tensors[:3], PROMPTS[:3])
    clip = Clip(tiny_clip, "cpu")
    ours = 100 * cosine(clip.images(pictures[:3]), clip.texts(PROMPTS[:3]))
    assert max(ours.mean(), 0.0) == pytest.approx(float(theirs.compute()), rel=1e-3)


def test_preference_is_the_scaled_cosine_of_the_model_itself(
    tiny_clip: Path, pictures: list[np.ndarray]
) -> None:
    given = [PreferenceModel(name="pick_score", path="unused")]
    assert judge_names(["digits", *given]) == ["digit", "style", "pick_score"]
    judges = open_judges(given, {"pick_score": tiny_clip}, "cpu")
    scores = judge_pictures(judges, np.stack(pictures[::3]), PROMPTS[:2])["pick_score"]
    model = CLIPModel.from_pretrained(tiny_clip).eval()
    processor = CLIPImageProcessor.from_pretrained(tiny_clip)
    tokens = CLIPTokenizer.from_pretrained(tiny_clip)(
        PROMPTS[:2], padding=True, return_tensors="pt"
    )
    pixels = processor(pictures[::3], return_tensors="pt").pixel_values
    with torch.no_grad():
        expected = model(pixel_values=pixels, **tokens).logits_per_image.diag().numpy()
    np.testing.assert_allclose(scores, expected, rtol=1e-3)


@pytest.fixture
def tiny_dino(tmp_path: Path) -> Path:
    """A Dinov2Model folder with image processor: 28 x 28 pictures, 16 features."""
    config = Dinov2Config(
        hidden_size=16, num_hidden_layers=2, num_attention_heads=2, image_size=28, patch_size=14
    )
    torch.manual_seed(0)
    Dinov2Model(config).save_pretrained(tmp_path / "dino")
    sizes = {"size": {"shortest_edge": 28}, "crop_size": {"height": 28, "width": 28}}
    BitImageProcessor(**sizes).save_pretrained(tmp_path / "dino")
    return tmp_path / "dino"


def test_dinov2_features_are_the_normalised_class_token(
    tiny_dino: Path, pictures: list[np.ndarray]
) -> None:
    """Of whole pictures, resized as by Stein et al. (layer6ai-labs/dgm-eval, models/dinov2.py)."""
    check_image_encoder(tiny_dino)
    found = open_image_encoder(tiny_dino, "cpu").images(pictures)
    model = Dinov2Model.from_pretrained(tiny_dino).eval()
    processor = BitImageProcessor.from_pretrained(tiny_dino)
    small = [Image.fromarray(p).resize((28, 28), Image.Resampling.BICUBIC) for p in pictures]
    pixels = processor(small, return_tensors="pt").pixel_values
    with torch.no_grad():
        states = model(pixel_values=pixels).last_hidden_state
    np.testing.assert_allclose(found, states[:, 0].numpy(), atol=1e-5)
    assert found.shape == (4, 16)
    assert isinstance(open_image_encoder(tiny_dino, "cpu"), VisionModel)


def test_a_clip_folder_is_an_image_encoder_by_its_projected_features(
    tiny_clip: Path, pictures: list[np.ndarray]
) -> None:
    found = open_image_encoder(tiny_clip, "cpu").images(pictures)
    clip = Clip(tiny_clip, "cpu")
    np.testing.assert_allclose(found[::3], clip.images(pictures[::3]), atol=1e-5)  # square ones
    assert np.abs(found[1:3] - clip.images(pictures[1:3])).max() > 0.01, "whole"


@pytest.fixture
def tiny_vit(tiny_dino: Path) -> Path:
    """The Dinov2Model with an image processor that keeps the shape of a picture."""
    ViTImageProcessor(size={"shortest_edge": 28}, resample=3).save_pretrained(tiny_dino)
    return tiny_dino


@pytest.fixture
def tiny_convnext(tmp_path: Path) -> Path:
    """A ConvNextModel folder with image processor: 32 x 32 pictures, 16 features."""
    config = ConvNextConfig(hidden_sizes=[8, 16], depths=[1, 1], num_stages=2, image_size=32)
    torch.manual_seed(0)
    ConvNextModel(config).save_pretrained(tmp_path / "convnext")
    ConvNextImageProcessor(size={"shortest_edge": 32}).save_pretrained(tmp_path / "convnext")
    return tmp_path / "convnext"


@pytest.fixture
def tiny_poolformer(tmp_path: Path) -> Path:
    """A PoolFormerModel folder with image processor: 32 x 32 pictures, 16 features."""
    sizes = {"hidden_sizes": [8, 16], "depths": [1, 1], "num_encoder_blocks": 2}
    more = {"patch_sizes": [7, 3], "strides": [4, 2], "padding": [2, 1]}
    torch.manual_seed(0)
    PoolFormerModel(PoolFormerConfig(**sizes, **more)).save_pretrained(tmp_path / "poolformer")
    sizes = {"size": {"shortest_edge": 32}, "crop_size": {"height": 32, "width": 32}}
    PoolFormerImageProcessor(**sizes).save_pretrained(tmp_path / "poolformer")
    return tmp_path / "poolformer"


@pytest.mark.parametrize("kind", ["tiny_vit", "tiny_convnext", "tiny_poolformer"])
def test_pictures_are_resized_to_one_size_where_the_processor_keeps_shapes_or_crops_otherwise(
    kind: str, request: pytest.FixtureRequest, pictures: list[np.ndarray]
) -> None:
    """ConvNeXt's and PoolFormer's processors enlarge a picture by `crop_pct`, and crop it."""
    folder: Path = request.getfixturevalue(kind)
    check_image_encoder(folder)
    found = open_image_encoder(folder, "cpu").images(pictures)
    side = 28 if kind == "tiny_vit" else 32
    small = [Image.fromarray(p).resize((side, side), Image.Resampling.BICUBIC) for p in pictures]
    processor = AutoImageProcessor.from_pretrained(folder)
    pixels = processor(small, do_resize=False, do_center_crop=False, return_tensors="pt")
    with torch.no_grad():
        states = AutoModel.from_pretrained(folder).eval()(**pixels)
    expected = getattr(states, "pooler_output", None)
    if expected is None:
        expected = states.last_hidden_state.mean(dim=1).flatten(1)
    np.testing.assert_allclose(found, expected.numpy(), atol=1e-5)
    assert digest_image_encoder(folder) != digest_model(folder)


@pytest.mark.parametrize("kind", ["tiny_clip", "tiny_dino", "tiny_siglip"])
def test_the_digest_of_other_image_encoders_is_that_of_their_files(
    kind: str, request: pytest.FixtureRequest
) -> None:
    """Their stored features are found again."""
    folder: Path = request.getfixturevalue(kind)
    assert digest_image_encoder(folder) == digest_model(folder)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"size": {"longest_edge": 28}, "do_center_crop": False}, "its size is .*longest_edge"),
        ({"do_resize": False}, "do_resize is false"),
    ],
)
def test_an_image_processor_without_a_size_for_all_pictures_is_refused(
    tiny_dino: Path, config: dict[str, Any], words: str
) -> None:
    _change(tiny_dino / "preprocessor_config.json", config)
    with pytest.raises(Refused, match=f"does not resize whole pictures to one size: {words}"):
        check_image_encoder(tiny_dino)


def test_a_clip_whose_processor_keeps_the_shape_of_a_picture_sees_it_whole_alone(
    tiny_clip: Path, tmp_path: Path, pictures: list[np.ndarray]
) -> None:
    folder = Path(shutil.copytree(tiny_clip, tmp_path / "clip"))
    _change(folder / "preprocessor_config.json", {"do_center_crop": False})
    with pytest.raises(Refused, match=r"evaluate\.clip: .* set do_center_crop to true"):
        check_clip(folder)
    check_image_encoder(folder)
    found, theirs = (
        open_image_encoder(path, "cpu").images(pictures) for path in (folder, tiny_clip)
    )
    np.testing.assert_array_equal(found, theirs)


def _change(path: Path, settings: dict[str, Any]) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | settings))


@pytest.mark.parametrize("kind", ["tiny_clip", "tiny_dino", "tiny_convnext"])
def test_an_image_encoder_sees_the_borders_of_a_picture(
    kind: str, request: pytest.FixtureRequest
) -> None:
    folder: Path = request.getfixturevalue(kind)
    picture = np.random.default_rng(0).integers(0, 256, (76, 52, 3), np.uint8)
    other = picture.copy()
    other[:8], other[-8:] = 255, 0
    middle, border = open_image_encoder(folder, "cpu").images([picture, other])
    assert np.abs(middle - border).max() > 0.05 * np.abs(middle).max()
    if kind == "tiny_clip":  # as torchmetrics, and as CMMD's authors (cmmd/io_util.py)
        same = Clip(folder, "cpu").images([picture, other])
        np.testing.assert_allclose(same[0], same[1], atol=1e-3 * np.abs(same).max())


@pytest.fixture
def tiny_siglip(tmp_path: Path) -> Path:
    """A SiglipModel folder with image processor: 32 x 32 pictures, 16 features."""
    small = {
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    config = SiglipConfig(
        text_config=small, vision_config=small | {"image_size": 32, "patch_size": 16}
    )
    SiglipModel(config).save_pretrained(tmp_path / "siglip")
    size = {"height": 32, "width": 32}
    SiglipImageProcessor(size=size).save_pretrained(tmp_path / "siglip")
    return tmp_path / "siglip"


def test_a_model_of_pictures_and_texts_is_an_image_encoder(
    tiny_siglip: Path, pictures: list[np.ndarray]
) -> None:
    check_image_encoder(tiny_siglip)
    found = open_image_encoder(tiny_siglip, "cpu").images(pictures)
    assert found.shape == (4, 16) and np.isfinite(found).all()


def test_a_model_that_needs_more_than_a_picture_is_reported_before_any_work(
    tiny_siglip: Path, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(tiny_siglip, tmp_path / "text"))
    BertConfig(hidden_size=16, num_hidden_layers=1, num_attention_heads=2).save_pretrained(folder)
    with pytest.raises(Refused, match=r"image_encoder: .* no features of a picture alone"):
        check_image_encoder(folder)


def test_an_image_encoder_without_some_of_its_weights_is_refused(tmp_path: Path) -> None:
    """Each process would draw them at random, so that stored features are of another model."""
    config = ViTConfig(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, image_size=32)
    ViTForImageClassification(config).save_pretrained(tmp_path)
    ViTImageProcessor(size={"height": 32, "width": 32}).save_pretrained(tmp_path)
    with pytest.raises(Refused, match=r"lacks weights \(pooler\.dense\.bias"):
        check_image_encoder(tmp_path)


def test_an_image_encoder_that_masks_patches_at_random_is_refused(tmp_path: Path) -> None:
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    ViTMAEModel(ViTMAEConfig(**sizes, image_size=32)).save_pretrained(tmp_path)
    ViTImageProcessor(size={"height": 32, "width": 32}).save_pretrained(tmp_path)
    with pytest.raises(Refused, match="masks patches at random"):
        check_image_encoder(tmp_path)


def test_an_image_encoder_that_masks_in_training_alone_is_accepted(tmp_path: Path) -> None:
    sizes = {"embed_dim": 8, "num_heads": [1, 1], "depths": [1, 1], "num_query_pool": 1}
    config = HieraConfig(**sizes, image_size=[32, 32], masked_unit_size=[4, 4])
    HieraModel(config).save_pretrained(tmp_path)
    ViTImageProcessor(size={"height": 32, "width": 32}).save_pretrained(tmp_path)
    check_image_encoder(tmp_path)


def test_an_image_encoder_that_is_a_clip_needs_its_tokenizer(
    tiny_clip: Path, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(tiny_clip, tmp_path / "clip"))
    check_image_encoder(folder)
    for name in ("tokenizer.json", "vocab.json"):
        (folder / name).unlink(missing_ok=True)
    with pytest.raises(Refused, match=r"evaluate\.image_encoder: .*tokenizer"):
        check_image_encoder(folder)


def test_pixels_do_not_depend_on_brightness_and_contrast(pictures: list[np.ndarray]) -> None:
    picture = pictures[0] // 4
    x = Pixels().images([picture, picture * 2 + 40, pictures[3]])
    assert cosine(x[:1], x[1:2])[0] == pytest.approx(1.0)
    assert abs(cosine(x[:1], x[2:])[0]) < 0.2


@pytest.mark.slow
def test_samples_are_scored_by_the_clip_model_and_the_judges_of_the_recipe(tiny_clip: Path) -> None:
    x8, labels = dataset.load("test")
    drawn = dataset.render(x8[:4], np.full(4, 2), np.random.default_rng(0))
    prompts = [captions.captions(int(label), 2)[0] for label in labels[:4]]
    strip = encode_picture(Image.fromarray(np.concatenate(list(drawn), axis=1)))
    found = SampleScorer(["digits"], tiny_clip, prompts)(strip)
    clip = Clip(tiny_clip, "cpu")
    scores = clip_scores(clip.images(drawn), clip.texts(prompts))
    said = judge_pictures(open_judges(["digits"], {}, "cpu"), drawn, prompts)
    assert found["clip_score"] == pytest.approx(scores.mean())
    assert {name: found[name] for name in said} == {n: p.mean() for n, p in said.items()}


def test_no_pictures_have_no_features(tiny_clip: Path) -> None:
    assert Clip(tiny_clip, "cpu").images([]).shape == (0, 24)


def test_the_error_of_a_folder_without_a_clip_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(Refused, match=r"evaluate\.clip: .* does not load as a CLIPModel") as caught:
        Clip(tmp_path, "cpu")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("without", "words"),
    [
        ("config.json", "has no config.json"),
        ("model.safetensors", "has no model.safetensors .*weights"),
        ("tokenizer.json vocab.json", "tokenizer"),
        ("tokenizer.json", r"^evaluate\.clip: .*/clip: merges\.txt is missing"),
        ("preprocessor_config.json processor_config.json", "image processor"),
    ],
)
def test_a_missing_part_is_reported_before_any_work(
    tiny_clip: Path, tmp_path: Path, without: str, words: str
) -> None:
    folder = Path(shutil.copytree(tiny_clip, tmp_path / "clip"))
    check_clip(folder)
    for name in without.split():
        (folder / name).unlink(missing_ok=True)
    with pytest.raises(Refused, match=words):
        check_clip(folder)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"crop_size": {"height": 16, "width": 16}}, "gives 16 x 16 pixels, .* 32 x 32: correct c"),
        ({"crop_size": 24}, "gives 24 x 24 pixels"),
        ({"do_center_crop": False, "size": {"height": 16, "width": 32}}, "gives 16 x 32 pixels"),
        ({"crop_size": 32, "size": {"shortest_edge": 40}}, None),
        ({"crop_size": [32, 32]}, None),
    ],
)
def test_the_image_processor_of_a_clip_gives_pictures_of_its_size(
    tiny_clip: Path, tmp_path: Path, changes: dict[str, Any], words: str | None
) -> None:
    folder = Path(shutil.copytree(tiny_clip, tmp_path / "clip"))
    _change(folder / "preprocessor_config.json", changes)
    for check_model in (check_clip, check_image_encoder):
        if words is None:
            check_model(folder)
            continue
        with pytest.raises(Refused, match=words):
            check_model(folder)


def test_weights_of_an_evaluator_that_are_cut_or_missing_are_found_before_any_work(
    tiny_clip: Path, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(tiny_clip, tmp_path / "clip"))
    weights = folder / "model.safetensors"
    (folder / "model.safetensors.index.json").write_text("{}")
    weights.rename(folder / "model-00001-of-00002.safetensors")
    with pytest.raises(Refused, match=r"evaluate\.clip: .*: only 1 of 2 files of weights"):
        check_clip(folder)
    (folder / "model-00001-of-00002.safetensors").rename(tmp_path / "away")
    with pytest.raises(Refused, match=r"evaluate\.clip: .* has no \.safetensors weights"):
        check_clip(folder)
    weights.write_bytes((tmp_path / "away").read_bytes()[:-1])
    with pytest.raises(Refused, match=r"evaluate\.clip: .* is no valid safetensors file"):
        check_clip(folder)


def test_a_text_encoder_alone_is_not_a_clip(tiny_sdxl: Path) -> None:
    with pytest.raises(Refused, match=r"evaluate\.clip: .* model_type is clip_text_model"):
        check_clip(tiny_sdxl / "text_encoder")


@pytest.mark.slow
def test_the_digits_judge_recognises_real_digits() -> None:
    x8, labels = dataset.load("test")
    style = style_index(NEW_STYLE)
    rng = np.random.default_rng(0)
    images = dataset.render(x8[:40], np.full(40, style), rng)
    right = [captions.captions(int(label), style)[0] for label in labels[:40]]
    wrong = [captions.captions(int(label + 1) % 10, style)[0] for label in labels[:40]]
    said = judge_pictures(open_judges(["digits"], {}, "cpu"), images, right)
    assert said["digit"].mean() > 0.9 and said["style"].mean() > 0.9
    assert judge_pictures(open_judges(["digits"], {}, "cpu"), images, wrong)["digit"].mean() < 0.1


def test_unsupported_prompts_of_a_judge_are_reported_before_any_work() -> None:
    check(load_recipe("digits"))
    with pytest.raises(Refused, match=r"evaluate\.judges: digits: .*a cat"):
        check(load_recipe("digits", {"evaluate.prompts.new.prompts": ["a cat"]}))


def test_clip_score_is_a_hundredfold_cosine_and_never_negative() -> None:
    images = np.array([[1.0, 0.0], [3.0, 3.0], [1.0, 0.0]])
    texts = np.array([[2.0, 0.0], [0.0, 1.0], [-1.0, 0.0]])
    np.testing.assert_allclose(clip_scores(images, texts), [100.0, 50 * 2**0.5, 0.0])
