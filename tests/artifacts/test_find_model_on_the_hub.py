"""A model of the hub is fetched once and whole; what the hub refuses is said in one line."""

import hashlib
import shutil
from pathlib import Path
from uuid import UUID

import pytest
from hub_server import HubServer, Repository
from huggingface_hub.errors import OfflineModeIsEnabled

from artifacts.models import (
    check_model_available,
    digest_model,
    files_to_fetch,
    resolve_configs,
    resolve_model,
)
from configs.errors import Away, Refused

SDXL = {
    "model_index.json",
    "README.md",
    "unet/config.json",
    "unet/diffusion_pytorch_model.safetensors",
    "text_encoder/model.safetensors",
    "tokenizer/merges.txt",
}


def test_files_that_others_fetch_into_the_cache_of_the_hub_do_not_count(tmp_path: Path) -> None:
    folder = tmp_path / "models--ours--tiny/snapshots/1234"
    (folder / "vae").mkdir(parents=True)
    (tmp_path / "models--ours--tiny/blobs").mkdir()
    for name in ("model_index.json", "vae/diffusion_pytorch_model.safetensors"):
        (folder / name).write_bytes(b"one")
    copy = Path(shutil.copytree(folder, tmp_path / "copy"))
    digests = [digest_model(folder), digest_model(folder, ("vae",)), digest_model(folder / "vae")]
    assert digests[0] == digest_model(copy)
    for name in ("diffusion_pytorch_model.fp16.safetensors", "diffusion_pytorch_model.bin"):
        (folder / "vae" / name).write_bytes(b"two")
        (copy / "vae" / name).write_bytes(b"two")
    (folder / "all.safetensors").write_bytes(b"two")  # a single-file checkpoint
    again = [digest_model(folder), digest_model(folder, ("vae",)), digest_model(folder / "vae")]
    assert again == digests
    assert digests[0] != digest_model(copy)  # a user's own folder counts as it is
    (folder / "vae/diffusion_pytorch_model.safetensors").write_bytes(b"two")
    assert digest_model(folder) != digests[0]


def test_a_variant_in_the_cache_of_the_hub_counts_where_it_is_read(tmp_path: Path) -> None:
    """Without plain weights a part is read from its fp16 variant."""
    folder = tmp_path / "models--ours--tiny/snapshots/1234"
    (folder / "vae").mkdir(parents=True)
    (tmp_path / "models--ours--tiny/blobs").mkdir()
    (folder / "chat_template.jinja").write_bytes(b"one")
    (folder / "vae/diffusion_pytorch_model.fp16.safetensors").write_bytes(b"one")
    digests = {digest_model(folder)}
    for name in ("vae/diffusion_pytorch_model.fp16.safetensors", "chat_template.jinja"):
        (folder / name).write_bytes(b"two")
        digests.add(digest_model(folder))
    assert len(digests) == 3


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("memory://nothing-here", "no files there"),
        ("foo://bar", "Protocol not known: foo"),
        ("no/such/folder", "no such folder"),
        ("no--such/repository", "'no--such/repository'"),
        ("no/repository", "the hub has no such model visible to you: if it is private, log in"),
        ("hf://no/repository", "no such file or folder"),
    ],
)
def test_a_missing_model_is_a_one_line_error(url: str, words: str, hub: HubServer) -> None:
    assert words in refused(url)


def test_a_model_that_the_cache_of_the_hub_lacks_offline_is_a_one_line_error(
    hub: HubServer, repository: Repository, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert "unset HF_HUB_OFFLINE to fetch it" in refused("some/model")
    with pytest.raises(Refused, match="unset HF_HUB_OFFLINE"):
        check_model_available("some/model", revision=None)
    assert hub.requests == []
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    check_model_available("some/model", revision=None)
    resolve_model("some/model")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    check_model_available("some/model", revision=None)


def test_a_model_in_the_cache_of_the_hub_is_not_asked_for(
    hub: HubServer, repository: Repository
) -> None:
    resolve_model("some/model")
    hub.requests.clear()
    check_model_available("some/model", revision=None)
    assert hub.requests == []


def refused(url: str, revision: str | None = None, *, away: bool = False) -> str:
    """The one line that says why there is no such model.

    Args:
        away: whether the hub may have it later.
    """
    with pytest.raises(Away if away else Refused) as raised:
        resolve_model(url, revision=revision)
    line = str(raised.value)
    assert line.startswith(f"model {url}: ") and "\n" not in line
    return line


@pytest.fixture
def repository(hub: HubServer) -> Repository:
    hub.repositories["some/model"] = Repository(
        {path: f"{path} of the hub".encode() for path in sorted(SDXL)}
    )
    return hub.repositories["some/model"]


def test_a_model_of_the_hub_is_fetched_once(hub: HubServer, repository: Repository) -> None:
    repository.files["some-checkpoint.safetensors"] = b"not what would be loaded"
    folder = resolve_model("some/model")
    found = {p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*.*")}
    assert found == {path: repository.files[path] for path in SDXL}
    assert folder.name == repository.commit
    fetched = len(hub.requests)
    assert resolve_model("some/model") == folder
    assert not [path for _, path in hub.requests[fetched:] if not path.startswith("/api/")]


def test_a_part_without_plain_weights_is_fetched_in_its_variant(
    hub: HubServer, repository: Repository
) -> None:
    half = "unet/diffusion_pytorch_model.fp16.safetensors"
    files = dict(repository.files)
    files[half] = files.pop("unet/diffusion_pytorch_model.safetensors")
    repository.files = {**files, "text_encoder/model.fp16.safetensors": b"another copy"}
    check_model_available("some/model", revision=None)
    assert not list(resolve_configs("some/model").rglob("*.safetensors"))
    folder = resolve_model("some/model")
    found = {p.relative_to(folder).as_posix() for p in folder.rglob("*.safetensors")}
    assert found == {half, "text_encoder/model.safetensors"}
    hub.requests.clear()
    assert resolve_model("some/model") == folder
    assert all(path.startswith("/api/") for _, path in hub.requests)


def test_an_interrupted_download_of_a_variant_is_completed(repository: Repository) -> None:
    name = "unet/diffusion_pytorch_model"
    shards = [f"{name}.fp16-0000{number}-of-00002.safetensors" for number in (1, 2)]
    del repository.files[f"{name}.safetensors"]
    repository.files |= {shard: shard.encode() for shard in shards}
    before = digest_model(folder := resolve_model("some/model"))
    (folder / shards[1]).unlink()
    assert digest_model(resolve_model("some/model")) == before


def test_a_model_without_parts_may_have_a_variant_alone(
    hub: HubServer, capfd: pytest.CaptureFixture[str]
) -> None:
    weights = "diffusion_pytorch_model.fp16.safetensors"
    found = Repository({"config.json": b"{}", weights: b"vae", "x.fp16.safetensors": b"other"})
    hub.repositories["some/vae"] = found
    check_model_available("some/vae", revision=None)
    names = [path.name for path in resolve_model("some/vae").rglob("*.safetensors")]
    assert names == [weights]
    found.files = {"config.json": b"{}", "pytorch_model.bin": b"vae"}
    assert not list(resolve_model("some/vae").rglob("*.safetensors"))
    assert "No files matched" not in capfd.readouterr().err


def test_damaged_weights_in_the_cache_of_the_hub_are_refused(repository: Repository) -> None:
    before = digest_model(folder := resolve_model("some/model"))
    weights = (folder / "unet/diffusion_pytorch_model.safetensors").resolve()
    weights.write_bytes(weights.read_bytes()[:-1])
    assert f"{weights} is damaged: delete it to have it fetched again" in refused("some/model")
    resolve_configs("some/model")
    weights.unlink()
    assert digest_model(resolve_model("some/model")) == before


def test_a_damaged_variant_of_a_part_without_other_weights_is_refused(
    repository: Repository,
) -> None:
    """Another program has fetched it into the cache."""
    whole = "unet/diffusion_pytorch_model.safetensors"
    repository.files = {name: data for name, data in repository.files.items() if name != whole}
    folder = resolve_model("some/model")
    blob = folder.parents[1] / "blobs" / ("0" * 64)
    blob.write_bytes(b"cut short")
    (folder / "unet/diffusion_pytorch_model.fp16.safetensors").symlink_to(blob)
    assert f"{blob} is damaged: delete it to have it fetched again" in refused("some/model")


def test_of_a_model_of_the_hub_the_configs_alone_may_be_had(repository: Repository) -> None:
    folder = resolve_configs("some/model")
    assert (folder / "unet/config.json").read_bytes() == b"unet/config.json of the hub"
    assert not list(folder.rglob("*.safetensors"))


def test_a_revision_is_what_it_was(hub: HubServer, repository: Repository) -> None:
    old = repository.commit
    before = resolve_model("some/model", revision=old)
    repository.files = {**repository.files, "unet/config.json": b"{}"}
    assert (resolve_model("some/model") / "unet/config.json").read_bytes() == b"{}"
    assert resolve_model("some/model", revision=old) == before
    assert "no revision nonesuch" in refused("some/model", revision="nonesuch")


def test_a_model_of_the_hub_by_its_url(repository: Repository, own_cache: Path) -> None:
    folder = resolve_model("hf://some/model")
    assert (folder / "unet/config.json").read_bytes() == b"unet/config.json of the hub"


def test_a_gated_model_requires_accepted_terms(
    hub: HubServer, repository: Repository, monkeypatch: pytest.MonkeyPatch
) -> None:
    repository.accepted_by = {"hf_mine"}
    terms = f"accept its terms at {hub.url}/some/model, then log in"
    assert terms in refused("some/model")
    monkeypatch.setenv("HF_TOKEN", "hf_stranger")
    assert terms in refused("some/model")
    assert "hub has no such model visible to you" in refused("no/repository")
    monkeypatch.setenv("HF_TOKEN", "hf_mine")
    assert resolve_model("some/model").name == repository.commit


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        (500, "could not serve it (Server error '500 Internal Server Error'"),
        (403, "could not serve it (403 Forbidden"),
        (429, "could not serve it (429 Too Many Requests"),
        ("page", "could not serve it (Expecting value"),
        ("cut", "could not serve it (peer closed connection"),
    ],
)
def test_hub_errors_are_one_line_errors(
    fault: int | str,
    words: str,
    hub: HubServer,
    repository: Repository,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("time.sleep", lambda seconds: None)  # between the client's own tries
    hub.fault = fault
    assert words in refused("some/model", away=fault in (500, 429, "cut"))


def test_without_a_network_only_what_was_fetched_before_is_there(
    repository: Repository, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = resolve_model("some/model")
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    assert resolve_model("some/model") == folder
    assert "the hub cannot be reached at http://127.0.0.1:9" in refused("other/model", away=True)


@pytest.mark.parametrize(
    ("error", "away"),
    [
        (ConnectionError("no answer"), True),
        (TimeoutError("no answer"), True),
        (PermissionError("no token"), False),
        (OfflineModeIsEnabled("HF_HUB_OFFLINE is set"), False),
    ],
)
def test_an_outage_of_the_store_of_weights_of_the_hub_may_pass(
    error: Exception, away: bool, repository: Repository, monkeypatch: pytest.MonkeyPatch
) -> None:
    """hf_xet raises errors of Python; here it has nothing to ask."""

    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr("huggingface_hub.file_download._download_to_tmp_and_move", fail)
    refused("some/model", away=away)


def test_a_full_disk_is_no_missing_model(
    repository: Repository, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    digest = hashlib.sha256(repository.files["unet/diffusion_pytorch_model.safetensors"])
    monkeypatch.setattr("uuid.uuid4", lambda: UUID(int=0))  # part of the name that is written to
    blobs = tmp_path / "hub/models--some--model/blobs"
    blobs.mkdir(parents=True)
    (blobs / f"{digest.hexdigest()}.{UUID(int=0).hex[:8]}.incomplete").symlink_to("/dev/full")
    with pytest.raises(Away, match=f"no space left for the cache {tmp_path}/hub: .* HF_HOME"):
        resolve_model("some/model")


@pytest.mark.parametrize(
    ("there", "wanted"),
    [
        (
            {
                *SDXL,
                "sd_xl_base_1.0.safetensors",
                "sd_xl_base_1.0_0.9vae.safetensors",
                "sd_xl_offset_example-lora_1.0.safetensors",
                "unet/diffusion_pytorch_model.fp16.safetensors",
                "unet/diffusion_pytorch_model.bf16.safetensors",
                "text_encoder/flax_model.msgpack",
                "unet/diffusion_pytorch_model.bin",
            },
            SDXL,
        ),
        (
            {
                "text_encoder_3/model-00001-of-00002.safetensors",
                "text_encoder_3/model.fp16-00001-of-00002.safetensors",
                "text_encoder_3/model.bf16-00001-of-00002.safetensors",
                "tokenizer_3/spiece.model",
                "text_encoders/t5xxl_fp16.safetensors",
                "transformer/diffusion_pytorch_model.safetensors",
            },
            {
                "text_encoder_3/model-00001-of-00002.safetensors",
                "tokenizer_3/spiece.model",
                "transformer/diffusion_pytorch_model.safetensors",
            },
        ),
        (
            {"vae/model.fp16.safetensors", "vae/model.bin", "unet/model.fp16.safetensors"},
            {"vae/model.fp16.safetensors", "unet/model.fp16.safetensors"},
        ),
        (
            {"LICENSE", "LICENCE", "NOTICE", "Dockerfile", "tokenizer/chat_template.jinja"},
            {"LICENSE", "LICENCE", "NOTICE", "tokenizer/chat_template.jinja"},
        ),
        (
            {"config.json", "model.safetensors", "pytorch_model.bin"},
            {"config.json", "model.safetensors"},
        ),
        (
            {"config.json", "diffusion_pytorch_model.safetensors", "sdxl_vae.safetensors"},
            {"config.json", "diffusion_pytorch_model.safetensors"},
        ),
        (
            {"pytorch_lora_weights.safetensors", "mine_kohya.safetensors", "recipe.yaml"},
            {"pytorch_lora_weights.safetensors", "recipe.yaml"},
        ),
    ],
)
def test_only_what_would_be_loaded_is_taken_from_the_hub(there: set[str], wanted: set[str]) -> None:
    assert set(files_to_fetch(there)) == wanted
