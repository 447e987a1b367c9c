"""Pass on a published model: push it to the Hugging Face hub, sign and verify it.

sigstore's model-signing signs a model's folder with a local key, and verifies it.
"""

from __future__ import annotations

import glob
import logging
import os
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from artifacts.errors import is_outage
from artifacts.models import resolve_model, was_not_reached
from artifacts.records import write_atomic
from artifacts.store import MANIFEST
from configs.checks import Finding, fine, note
from configs.errors import Away, Failed, Refused, UserError
from tasks.build_or_reuse import REPORT
from tasks.publish.model_card import TAG
from tasks.publish.registry import Registry, Version
from tasks.secret_blocks import block, block_name

if TYPE_CHECKING:
    from huggingface_hub import HfApi, ModelInfo

SIGNATURE = "model.sig"
PASSWORD = "KILN_SIGNING_PASSWORD"
#: What the library's error says of a changed file: its name, then digests in escaped bytes.
CHANGED = re.compile(
    r"Hash mismatch for \\?'(.+?)\\?': Expected .*?(?=Hash mismatch for|$)", re.DOTALL
)
#: What it says of files that were added or removed.
OTHERS = re.compile(r"""((?:Extra|Missing) files .+?)["'](?:,|\]|$)""")
#: Files beside a model's own, from the registry and the hub's client.
UNSIGNED = (MANIFEST, REPORT, SIGNATURE, ".cache")
log = logging.getLogger("kiln")


def check_login(*, needed: bool) -> Iterator[Finding]:
    """Whether the hub knows the token, if there is any.

    Args:
        needed: whether a model is pushed there. A token is then required.

    Raises:
        Refused: there is no token, or the hub refuses it.
        Away: the hub does not answer now.
    """
    from huggingface_hub import HfApi, get_token, is_offline_mode

    remedy = "hf auth login, or set HF_TOKEN"
    token = get_token()
    if token is None:
        if needed:
            raise Refused("publish.hub needs a hub token", remedy=remedy)
        return
    if is_offline_mode():
        return
    try:
        name = HfApi().whoami(token=token)["name"]  # waits without a limit, as `collect` does not
    except Exception as error:  # of several HTTP libraries
        is_away = is_outage(error)
        why = "does not answer" if is_away else "does not accept it"
        why = f"hub token: the hub {why} ({type(error).__name__})"
        remedy = "run again later" if is_away else remedy
        if needed:
            raise (Away if is_away else Refused)(why, remedy=remedy) from None
        yield note(why, remedy)
    else:
        yield fine(f"hub token: of {name}")


def sign_version(registry: Registry, version: Version, key: str) -> None:
    """Write `model.sig` beside a version's files, unless it has a valid one of the key.

    Raises:
        Refused: the key is unusable, or a file is not as published.
    """
    config = signer(key)
    if (fault := registry.fault(version)) is not None:
        raise Refused(f"{registry.name} {version.name} is not signed: {fault}")
    folder = resolve_model(version.uri)
    with tempfile.TemporaryDirectory(prefix="kiln-sign-") as scratch:
        if (folder / SIGNATURE).is_file() and _is_signed_by(key, folder, Path(scratch)):
            return
        signed = Path(scratch, SIGNATURE)
        config.set_hashing_config(_hashing(folder)).sign(folder, signed)
        path = f"{registry.root}/{version.name}/{SIGNATURE}"
        write_atomic(registry.fs, path, signed.read_bytes())
    log.info("publish: %s %s is signed", registry.name, version.name)


def verify_folder(folder: Path, key: Path) -> None:
    """Check that a folder has exactly the files that the owner of a public key signed.

    Raises:
        Refused: the folder has no signature, one of another key, or other files.
    """
    from cryptography.hazmat.primitives import serialization as pem
    from model_signing import verifying

    try:
        pem.load_pem_public_key(key.read_bytes())
    except (OSError, ValueError) as error:
        raise Refused(f"public key {key}: {error}") from None
    if not (folder / SIGNATURE).is_file():
        raise Refused(f"{folder} is not signed: it has no {SIGNATURE}")
    try:
        verifier = verifying.Config().use_elliptic_key_verifier(public_key=key)
        verifier.set_hashing_config(_hashing(folder)).verify(folder, folder / SIGNATURE)
    except Exception as error:  # the library raises many types, also for damaged signatures
        reason = str(error) or type(error).__name__
        if changed := CHANGED.findall(reason):
            others = OTHERS.findall(CHANGED.sub("", reason))
            reason = "; ".join([*others, f"changed files: {', '.join(changed)}"])
        raise Refused(f"{folder} is not as signed by {key}: {reason}") from None


def _hashing(folder: Path):  # type: ignore[no-untyped-def]  # the library is imported late: 0.7 s
    from model_signing import hashing

    # The hub's cache keeps files as links into its store.
    paths = [folder / name for name in UNSIGNED]
    return hashing.Config().set_ignored_paths(paths=paths).set_allow_symlinks(True)


def signer(key: str):  # type: ignore[no-untyped-def]
    """The library's signer. Raises Refused for a file that is no private key of its curves."""
    from model_signing import signing

    try:
        return signing.Config().use_elliptic_key_signer(private_key=key, password=_password())
    except AttributeError:  # of another kind of key
        reason = "it is of no elliptic curve"
    except TypeError as error:  # a password is missing, or superfluous
        reason = f"{error} ({PASSWORD})"
    except (OSError, ValueError) as error:
        reason = str(error)
    raise Refused(f"signing key {key}: {reason} (see docs/publishing.md)")


def _password() -> Any:
    """Bytes, which the library passes on; it declares a text."""
    password = os.environ.get(PASSWORD)
    return None if password is None else password.encode()


def _is_signed_by(key: str, folder: Path, scratch: Path) -> bool:
    from cryptography.hazmat.primitives import serialization as pem

    private = pem.load_pem_private_key(Path(key).read_bytes(), _password())
    public = private.public_key().public_bytes(
        pem.Encoding.PEM, pem.PublicFormat.SubjectPublicKeyInfo
    )
    (scratch / "public.pem").write_bytes(public)
    try:
        verify_folder(folder, scratch / "public.pem")
    except Refused:
        return False
    return True


CARD = "README.md"
MADE_BY_HUB = {".gitattributes"}  # with each repository


def push(registry: Registry, version: Version, repo: str, *, private: bool = True) -> str:
    """Upload a version's files that the repository lacks, and delete what the version lacks.

    An interrupted push continues where it stopped. The registry's own files stay here: the report
    shows pictures of the source.

    Returns the URL of the repository's newest commit.

    Raises:
        Failed: the hub refused, or could not be reached; or the repository has files, and no
            model card of Kilnworks.
    """
    from httpx2 import HTTPError
    from huggingface_hub import HfApi

    paths = [entry.path for entry in version.manifest["files"]] + [SIGNATURE]
    if (fault := registry.fault(version)) is not None:
        raise Failed(f"{registry.name} {version.name} is damaged: {fault}")
    folder = resolve_model(version.uri)  # its errors are none of the hub
    api = HfApi(token=_token(registry.name), library_name="kilnworks")
    try:
        api.create_repo(repo, private=private, exist_ok=True)
        info = api.model_info(repo)
        if private and not info.private:
            raise Failed(f"the repository {repo} is public: make it private, or use --public")
        _check_own(api, info)
        done = api.upload_folder(
            repo_id=repo,
            folder_path=folder,
            allow_patterns=[glob.escape(path) for path in paths],
            delete_patterns="*",
            parent_commit=info.sha,  # of the files that were checked
            commit_message=f"{registry.name} {version.name}, {version.manifest['digest'][:12]}",
        )
    except (OSError, HTTPError, ValueError, RuntimeError) as error:
        if isinstance(error, UserError):
            raise
        reason = next((line for line in str(error).splitlines() if line.strip()), repr(error))
        happened = "cannot be reached for" if was_not_reached(error) else "refused"
        raise Failed(f"the hub {happened} {repo}: {reason.strip()}") from error
    return str(done.commit_url)


def _check_own(api: HfApi, info: ModelInfo) -> None:
    """Raise Failed if a push would delete files that Kilnworks did not write."""
    from huggingface_hub import ModelCard

    names = sorted({file.rfilename for file in info.siblings or []} - MADE_BY_HUB)
    if CARD in names:
        path = api.hf_hub_download(info.id, CARD, revision=info.sha)
        if TAG in (ModelCard.load(path, ignore_metadata_errors=True).data.tags or []):
            return
    if names:
        raise Failed(
            f"the repository {info.id} has files that Kilnworks did not write, such as "
            f"{names[0]}, and a push would delete them: name another repository, or empty this one"
        )


def command(registry: Registry, version: Version, repo: str, *, private: bool) -> str:
    """The command that repeats a push."""
    public = "" if private else " --public"
    return (
        f"kiln push {registry.name}@{version.name} {repo} --registry {registry.store.url}{public}"
    )


def token_block(model: str) -> str:
    """Name of Prefect's secret block with the hub token; each team has its own."""
    return block_name("hub-token", model)


def _token(model: str) -> str | None:
    """The token of HF_TOKEN, else of Prefect's block in a flow, else None: that of the login."""
    return None if os.environ.get("HF_TOKEN") else block("hub-token", model)
