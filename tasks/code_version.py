"""The versions of this code and of its packages, which manifests record.

The version of the code is that of pyproject.toml, its git commit, and a digest of its files. The
bytes of shards depend on the versions of this process's code and packages.
"""

from __future__ import annotations

import subprocess
import sys
import tomllib
from collections.abc import Iterable
from contextlib import suppress
from functools import lru_cache
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

from artifacts.records import digest_bytes, digest_json
from configs.load_recipe import CHECKOUT
from runtimes.registry import interpreter, spec_of

#: Packages whose versions a manifest records.
RECORDED_PACKAGES = (
    *("kilnworks", "prefect", "apache-beam", "img2dataset", "numpy", "pillow", "safetensors"),
    *("torch", "diffusers", "transformers", "torch_xla", "jax", "torchax", "mindspore"),
)
#: Packages that decode, resize, encode and write.
SHARD_PACKAGES = (
    *("img2dataset", "numpy", "opencv-python-headless", "pillow", "pyarrow", "safetensors"),
    *("torch", "diffusers", "transformers", "onnxruntime", "scipy"),
)
FOLDERS = ("artifacts", "configs", "runtimes", "tasks")


@lru_cache
def versions(runtime: str = "torch") -> dict[str, str]:
    """Package -> version in this process, and in the interpreter of a runtime's encoders.

    `Kilnworks` is a digest of our code. Raises Refused if the runtime is not installed.
    """
    ours = {"Kilnworks": CODE, **package_versions(sys.executable, SHARD_PACKAGES)}
    python = interpreter(runtime)
    packages = (*SHARD_PACKAGES, *spec_of(runtime).needs)
    theirs = package_versions(python, packages)
    if python == sys.executable:
        return ours | theirs
    return ours | {f"{name} ({runtime})": version for name, version in theirs.items()}


def versions_of_shards(runtime: str) -> dict[str, str]:
    """Package -> version in the interpreter of a runtime, and `Kilnworks`, wherever it is asked.

    A version's local part is left out: builds for several chips (2.9.0+cu128) are one version.
    Raises Refused if the runtime is not installed.
    """
    packages = (*SHARD_PACKAGES, *spec_of(runtime).needs)
    found = package_versions(interpreter(runtime), packages)
    public = {name: version.partition("+")[0] for name, version in found.items()}
    return {"Kilnworks": CODE, **public}


def code_digest(root: Path = CHECKOUT) -> str:
    """Digest of our modules; an editor's files, such as the dangling link `.#a.py`, are none."""
    paths = (path for name in FOLDERS for path in (root / name).rglob("*.py"))
    digests = {}
    for path in sorted(path for path in paths if not path.name.startswith(".")):
        with suppress(FileNotFoundError):
            digests[path.relative_to(root).as_posix()] = digest_bytes(path.read_bytes())
    return digest_json(digests)[:12]


#: The digest at the time of the import: a long-lived worker runs the code that it began with.
CODE = code_digest()


def runtime_facts(name: str) -> dict[str, Any]:
    """The runtime of a stage and the package versions of its environment, for a manifest."""
    return {"runtime": name, "versions": package_versions(interpreter(name), RECORDED_PACKAGES)}


def package_versions(python: str, packages: Iterable[str]) -> dict[str, str]:
    """Package -> version of installed packages in the environment of a Python interpreter."""
    folders = map(str, Path(python).parents[1].glob("lib/python*/site-packages"))
    path = sys.path if python == sys.executable else list(folders)
    installed = {name: list(distributions(name=name, path=path)) for name in packages}
    return {name: matches[0].version for name, matches in installed.items() if matches}


def git_commit() -> str | None:
    """Git commit of this code, with -dirty if the checkout has changes; None outside a checkout."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        done = subprocess.run(
            command, cwd=Path(__file__).parent, capture_output=True, text=True, timeout=10
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None


def version() -> str:
    """The version, commit and digest: `0.1.0 (1a2b3c..., code 4d5e6f...)`.

    An image has no commit; the digest tells its code from other code of the same version.
    """
    file = CHECKOUT / "pyproject.toml"
    number = tomllib.loads(file.read_text(encoding="utf-8"))["project"]["version"]
    known = [commit] if (commit := git_commit()) else []
    return f"{number} ({', '.join([*known, f'code {CODE}'])})"
