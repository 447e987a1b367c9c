"""Web servers, registries and an evaluated world for tests of the stages."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from picture_server import Web
from store_servers import REMOTE, UrlOf
from web_sites import Site

from artifacts.store import Store
from tasks.publish.registry import Registry

if TYPE_CHECKING:
    from evaluation_world import World


@pytest.fixture
def web() -> Iterator[Web]:
    with Web() as web:
        yield web


@pytest.fixture
def site() -> Iterator[Site]:
    site = Site()
    with site.server:
        yield site


@pytest.fixture(params=["local", "memory"])
def registry(request: pytest.FixtureRequest, url_of: UrlOf) -> tuple[Store, Registry]:
    url = url_of(request.param)
    return Store(url), Registry(f"{url}/registry", "digits")


@pytest.fixture(params=["local", "memory", *REMOTE])
def any_registry(request: pytest.FixtureRequest, url_of: UrlOf) -> tuple[Store, Registry]:
    url = url_of(request.param)
    return Store(url), Registry(f"{url}/registry", "digits")


@pytest.fixture(scope="session")
def evaluation_store(
    tiny_sdxl: Path, tiny_clip: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """A store with images and latents, which `world` copies."""
    from evaluation_world import fill_store  # imports PyTorch, which unit tests do not need

    folder = tmp_path_factory.mktemp("evaluate")
    fill_store(folder / "store", tiny_sdxl, tiny_clip, folder)
    return folder / "store"


@pytest.fixture
def world(evaluation_store: Path, tiny_sdxl: Path, tiny_clip: Path, tmp_path: Path) -> World:
    from evaluation_world import World, evaluation_recipe

    shutil.copytree(evaluation_store, tmp_path / "store")
    recipe = evaluation_recipe(tmp_path / "store", tiny_sdxl, tiny_clip)
    found = {artifact.stage: artifact for artifact in Store(recipe.store).artifacts()}
    return World(recipe, tiny_sdxl, tiny_clip, found["download"], found["encode"], tmp_path)
