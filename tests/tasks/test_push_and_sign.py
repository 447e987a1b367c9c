"""A published model is signed, pushed to the hub by its real client, pulled and verified."""

import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from cryptography.hazmat.primitives import serialization as pem
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.rsa import generate_private_key
from httpx2 import ConnectError
from hub_server import HubServer, Repository
from huggingface_hub import HfApi, constants, snapshot_download
from kiln_command import python
from store_drafts import flip
from store_servers import REMOTE, UrlOf
from tiny_adapters import make_lora

from artifacts.store import KeyParts
from configs.errors import Away, Failed, Refused
from configs.settings.generate import Generate
from flows.cli import main
from runtimes.pipeline_folder.folder import Base
from tasks.evaluate.published import load_published_model
from tasks.generate import find_model
from tasks.publish.assemble import assemble, write_adapters
from tasks.publish.hub import PASSWORD, SIGNATURE, _token, push, sign_version, signer, verify_folder
from tasks.publish.registry import Registry, Version

CARD = b"---\ntags:\n- kilnworks\n---\n# digits\n"
REPO, ADAPTERS, TOKEN = "someone/digits", "someone/adapters", "hf_tests"
PULL_AND_DRAW = """
import sys
from diffusers import DiffusionPipeline
from huggingface_hub import snapshot_download
pipe = DiffusionPipeline.from_pretrained(sys.argv[1])
picture = pipe("a fox", num_inference_steps=1, height=32, width=32, output_type="np").images
assert picture.std() > 0
snapshot_download(sys.argv[1], local_dir=sys.argv[2])
pipe.load_lora_weights(sys.argv[3])
assert pipe.get_active_adapters() == ["default_0"]
adapted = pipe("a fox", num_inference_steps=1, height=32, width=32, output_type="np").images
assert abs(adapted - picture).max() > 0
"""
Keys = Callable[..., tuple[str, Path]]


@pytest.fixture
def hub(hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> HubServer:
    """The hub, with a token that may write."""
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)  # the server has no chunk storage
    monkeypatch.setenv("HF_HUB_DISABLE_XET", "1")
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    hub.writers.add(TOKEN)
    return hub


@pytest.fixture
def make_keys(tmp_path: Path) -> Keys:
    """`make_keys(name)`: paths of a private and a public key."""

    def make(name: str = "key", curve: Any = ec.SECP256R1, password: bytes | None = None) -> Any:
        private, public = tmp_path / f"{name}.pem", tmp_path / f"{name}.pub"
        key = ec.generate_private_key(curve())
        locked = pem.BestAvailableEncryption(password) if password else pem.NoEncryption()
        private.write_bytes(key.private_bytes(pem.Encoding.PEM, pem.PrivateFormat.PKCS8, locked))
        public.write_bytes(
            key.public_key().public_bytes(pem.Encoding.PEM, pem.PublicFormat.SubjectPublicKeyInfo)
        )
        return str(private), public

    return make


def publish(registry: Registry, files: dict[str, bytes], number: int = 1) -> Version:
    draft = registry.store.draft(KeyParts("publish", 1, {"n": number}, {}))
    for path, data in files.items():
        draft.write(path, data)
    version = registry.publish(draft.commit({}, {}))
    registry.promote(version.name)
    return version


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def small(registry: Registry, weights: bytes = b"weights", number: int = 1) -> Version:
    files = {"README.md": CARD, "unet/model.safetensors": weights}
    return publish(registry, files | {"vae/model.safetensors": b"vae"}, number)


@pytest.fixture
def registry(tmp_path: Path) -> Registry:
    return Registry(str(tmp_path / "store/registry"), "digits")


def uploads(hub: HubServer) -> int:
    """Number of large files uploaded since the last call."""
    found = [path for method, path in hub.requests if method == "PUT"]
    hub.requests.clear()
    return len(found)


@pytest.mark.slow
def test_a_pushed_model_is_pulled_and_drawn_by_diffusers_and_a_flipped_byte_is_refused(
    hub: HubServer, registry: Registry, tiny_sdxl: Path, make_keys: Keys, tmp_path: Path
) -> None:
    assemble(Base.open(tiny_sdxl), {}, tmp_path / "model", dtype="float16")
    files = contents(tmp_path / "model")
    version = publish(registry, files | {"README.md": b"---\nlicense: mit\n---\n# digits\n"})
    private, public = make_keys()
    sign_version(registry, version, private)
    push(registry, version, REPO)
    lora = make_lora(tmp_path / "lora.safetensors")
    write_adapters(
        lora, Base.open(tiny_sdxl), tmp_path / "lora", name="x", dtype="float16", scheduler=None
    )
    adapters = Registry(registry.store.url, "adapters")
    push(adapters, publish(adapters, contents(tmp_path / "lora"), 2), ADAPTERS)
    pulled = tmp_path / "pulled"
    done = python("-P", "-c", PULL_AND_DRAW, REPO, str(pulled), ADAPTERS, cwd=Path("/"))
    assert done.returncode == 0, done.stderr
    assert not (pulled / "manifest.json").exists() and not (pulled / "report.html").exists()
    verify_folder(pulled, public)
    for name in ("unet/diffusion_pytorch_model.safetensors", "model_index.json", SIGNATURE):
        kept = (pulled / name).read_bytes()
        flip(pulled / name)
        with pytest.raises(Refused, match="not as signed by"):
            verify_folder(pulled, public)
        (pulled / name).write_bytes(kept)
    (pulled / "unet/extra.bin").write_bytes(b"malicious")
    with pytest.raises(Refused, match=r"extra\.bin"):
        verify_folder(pulled, public)


def test_a_push_is_private_and_uploads_what_changed_only(
    hub: HubServer, registry: Registry
) -> None:
    first = small(registry)
    url = push(registry, first, REPO)
    found = hub.repositories[REPO]
    assert found.private and url == f"{hub.url}/{REPO}/commit/{found.commit}"
    paths = [entry.path for entry in first.manifest["files"]]
    assert found.files == {path: Path(first.uri, path).read_bytes() for path in paths}
    assert uploads(hub) == 2
    push(registry, first, REPO)
    assert uploads(hub) == 0 and url.endswith(found.commit)
    second = small(registry, b"other weights", 2)
    hub.repositories[REPO].files["old.bin"] = b"of another version"
    push(registry, second, REPO)
    assert uploads(hub) == 1
    assert (
        found.files["unet/model.safetensors"] == b"other weights" and "old.bin" not in found.files
    )


def test_a_registry_that_is_away_is_no_refusal_of_the_hub(
    hub: HubServer, registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    def away(uri: str) -> Path:
        raise Away(f"model {uri}: cannot be read now")

    monkeypatch.setattr("tasks.publish.hub.resolve_model", away)
    with pytest.raises(Away):
        push(registry, small(registry), REPO)
    assert REPO not in hub.repositories


@pytest.mark.parametrize("card", [b"# Mine", b"---\ntags: [other]\n---\n", None])
def test_a_push_deletes_no_files_of_others(
    hub: HubServer, registry: Registry, card: bytes | None
) -> None:
    files = {"notes/a.txt": b"a"} | ({} if card is None else {"README.md": card})
    hub.repositories[REPO] = Repository(dict(files), private=True)
    with pytest.raises(Failed, match="has files that Kilnworks did not write, such as "):
        push(registry, small(registry), REPO)
    assert hub.repositories[REPO].files == files


def test_a_push_to_a_new_repository_of_the_hub_is_accepted(
    hub: HubServer, registry: Registry
) -> None:
    hub.repositories[REPO] = Repository({".gitattributes": b""}, private=True)
    push(registry, small(registry), REPO)
    assert "README.md" in hub.repositories[REPO].files


def test_adapters_and_trained_text_encoders_of_the_hub_are_those_that_were_pushed(
    hub: HubServer, registry: Registry, tiny_sdxl: Path, tmp_path: Path
) -> None:
    recipe = f"model: {{path: {tiny_sdxl}}}\ntrain: {{train_text_encoder: true}}\n".encode()
    card = {"README.md": CARD, "recipe.yaml": recipe}
    assemble(Base.open(tiny_sdxl), {}, tmp_path / "whole", dtype="float16")
    lora = make_lora(tmp_path / "lora.safetensors")
    write_adapters(
        lora, Base.open(tiny_sdxl), tmp_path / "lora", name="x", dtype="float16", scheduler=None
    )
    for number, name in enumerate(("whole", "lora")):
        version = publish(registry, contents(tmp_path / name) | card, number)
        push(registry, version, f"someone/{name}")
        pushed = find_model(Generate(model=f"someone/{name}", prompts=("a",)))
        local = load_published_model(Path(version.uri))
        assert pushed.digest == local.digest
        assert (pushed.weights.lora is None) == (name == "whole")


def test_an_interrupted_push_continues(hub: HubServer, registry: Registry) -> None:
    version = small(registry)
    hub.stop_after = 1
    with pytest.raises(Failed, match="the hub refused someone/digits"):
        push(registry, version, REPO)
    assert not hub.repositories[REPO].files
    hub.stop_after = None
    uploads(hub)
    push(registry, version, REPO)
    assert uploads(hub) == 1 and len(hub.repositories[REPO].files) == 3


def test_a_public_repository_receives_no_private_model(hub: HubServer, registry: Registry) -> None:
    version = small(registry)
    hub.repositories[REPO] = Repository({})
    with pytest.raises(Failed, match=r"is public: .*--public"):
        push(registry, version, REPO)
    assert not hub.repositories[REPO].files
    push(registry, version, REPO, private=False)
    assert hub.repositories[REPO].files


def test_a_refused_token_and_a_damaged_model_are_one_line(
    hub: HubServer, registry: Registry
) -> None:
    version = small(registry)
    hub.writers.clear()
    with pytest.raises(Failed, match=r"the hub refused someone/digits: .*403") as refused:
        push(registry, version, REPO)
    assert TOKEN not in str(refused.value) and "\n" not in str(refused.value)
    flip(Path(version.uri, "unet/model.safetensors"))
    with pytest.raises(Failed, match="digits v1 is damaged"):
        push(registry, version, REPO)


def test_a_hub_that_was_not_reached_has_not_refused(
    hub: HubServer, registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_route(*_: Any, **__: Any) -> None:
        raise ConnectError("[Errno -2] Name or service not known")

    monkeypatch.setattr(HfApi, "create_repo", no_route)
    with pytest.raises(Failed, match=r"cannot be reached for someone/digits: .*Name or"):
        push(registry, small(registry), REPO)


@pytest.mark.parametrize("kind", ["memory", *REMOTE])
def test_a_model_in_a_bucket_is_signed_and_pushed(
    kind: str, hub: HubServer, url_of: UrlOf, make_keys: Keys, own_cache: Path
) -> None:
    registry = Registry(f"{url_of(kind)}/registry", "digits")
    version = small(registry)
    private, public = make_keys()
    sign_version(registry, version, private)
    push(registry, version, REPO)
    verify_folder(Path(snapshot_download(REPO)), public)


def test_a_signature_of_another_key_and_a_missing_one_are_refused(
    registry: Registry, make_keys: Keys
) -> None:
    version = small(registry)
    (private, public), (_, other) = make_keys("one"), make_keys("two")
    with pytest.raises(Refused, match="is not signed"):
        verify_folder(Path(version.uri), public)
    sign_version(registry, version, private)
    verify_folder(Path(version.uri), public)
    with pytest.raises(Refused, match=r"not as signed by .*two"):
        verify_folder(Path(version.uri), other)


def test_a_valid_signature_is_kept_and_a_damaged_one_renewed(
    registry: Registry, make_keys: Keys
) -> None:
    version, (private, public) = small(registry), make_keys()
    sign_version(registry, version, private)
    path = Path(version.uri, SIGNATURE)
    first = path.read_bytes()
    sign_version(registry, version, private)
    assert path.read_bytes() == first
    flip(path)
    sign_version(registry, version, private)
    verify_folder(Path(version.uri), public)


def test_a_damaged_model_is_not_signed(registry: Registry, make_keys: Keys) -> None:
    version, (private, _) = small(registry), make_keys()
    flip(Path(version.uri, "unet/model.safetensors"))
    with pytest.raises(Refused, match=r"digits v1 is not signed: unet/model\.safetensors"):
        sign_version(registry, version, private)
    assert not Path(version.uri, SIGNATURE).exists()


def test_unusable_keys_are_one_line(
    make_keys: Keys, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(PASSWORD, raising=False)
    locked, _ = make_keys("locked", password=b"open sesame")
    curve, _ = make_keys("curve", curve=ec.SECP256K1)
    rsa = tmp_path / "rsa.pem"
    rsa.write_bytes(
        generate_private_key(65537, 2048).private_bytes(
            pem.Encoding.PEM, pem.PrivateFormat.PKCS8, pem.NoEncryption()
        )
    )
    with pytest.raises(Refused, match="it is of no elliptic curve"):
        signer(str(rsa))
    with pytest.raises(Refused, match=PASSWORD):
        signer(locked)
    for key in (str(tmp_path / "none.pem"), locked, curve, __file__):
        with pytest.raises(Refused, match=r"^signing key .*docs/publishing.md"):
            signer(key)
    monkeypatch.setenv(PASSWORD, "open sesame")
    signer(locked)


def test_the_commands_sign_push_and_verify(
    hub: HubServer,
    registry: Registry,
    make_keys: Keys,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    version, (private, public) = small(registry), make_keys()
    store = str(Path(registry.store.url).parent)

    def kiln(*words: str) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["kiln", *words])
        with pytest.raises(SystemExit) as end:
            main()
        said = capsys.readouterr()
        return int(end.value.code or 0), said.out + said.err

    monkeypatch.setattr("logging.disable", lambda *_: None)
    assert kiln("sign", "digits", "--key", private, "--store", store)[0] == 0
    code, said = kiln("verify", "digits@v1", "--key", str(public), "--store", store)
    assert code == 0 and "digits v1  whole" in said and "signed by the owner of" in said
    code, said = kiln("push", "digits", REPO, "--store", store)
    commit = hub.repositories[REPO].commit
    assert code == 0 and said.splitlines()[0] == f"{hub.url}/{REPO}/commit/{commit}"
    assert SIGNATURE in hub.repositories[REPO].files
    (tmp_path / "digits").mkdir()  # a folder of a model's name is ./digits
    monkeypatch.chdir(tmp_path)
    assert kiln("verify", "digits", "--key", str(public), "--store", store)[0] == 0
    code, said = kiln("verify", "./digits", "--key", str(public), "--store", store)
    assert code == 2 and "digits is not signed" in said
    code, said = kiln("verify", "digits", "--key", "none.pub", "--store", store)
    assert code == 2 and "public key none.pub: " in said
    code, said = kiln("push", "digits", "a/b/c", "--store", store)
    assert code == 2 and "push: Repo id must" in said
    copied = shutil.copytree(version.uri, f"{store}/copy")
    assert kiln("verify", str(copied), "--key", str(public), "--store", store)[0] == 0
    flip(Path(copied, "README.md"))
    code, said = kiln("verify", str(copied), "--key", str(public), "--store", store)
    assert code == 2 and "not as signed by" in said
    assert said.endswith(f"signed by {public}: changed files: README.md\n")
    Path(copied, "extra.txt").touch()
    _, said = kiln("verify", str(copied), "--key", str(public), "--store", store)
    assert said.endswith("in model 'copy': extra.txt; changed files: README.md\n")
    flip(Path(version.uri, "vae/model.safetensors"))
    code, said = kiln("verify", "digits", "--store", store)
    assert code == 1 and "vae/model.safetensors" in said
    code, said = kiln("history", "digits", "--store", store)
    assert code == 0 and "v1    promoted" in said


@pytest.mark.parametrize(("variable", "token"), [(None, TOKEN), ("", TOKEN), ("hf_mine", None)])
def test_a_flow_uses_the_secret_block_unless_hf_token_has_a_token(
    variable: str | None, token: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compose sets HF_TOKEN to the empty text if it is not given."""
    monkeypatch.setattr("prefect.context.FlowRunContext.get", lambda: object())
    block = SimpleNamespace(get=lambda: TOKEN)
    monkeypatch.setattr("prefect.blocks.system.Secret.load", lambda name: block)
    monkeypatch.delenv("HF_TOKEN", raising=False)
    if variable is not None:
        monkeypatch.setenv("HF_TOKEN", variable)
    assert _token("digits") == token
