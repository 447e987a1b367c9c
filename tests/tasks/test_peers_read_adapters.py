"""Other projects' own readers load published adapters, and add to each weight what ours add."""

import json
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from diffusers import FluxTransformer2DModel
from kiln_command import ROOT, python
from peft import LoraConfig, get_peft_model, set_peft_model_state_dict
from safetensors import safe_open
from safetensors.numpy import load_file
from tiny_adapters import write_adapters_of
from tiny_models import save_sdxl

from configs.settings.train_parts import Lora
from runtimes.adapters.lora_files import LORA_WEIGHTS, Adapters, read_adapters
from runtimes.pipeline_folder.folder import Base
from tasks.publish.assemble import KOHYA_SUFFIX, write_adapters

pytestmark = [pytest.mark.slow, pytest.mark.soak]
#: Packages of requirements/peers.txt: `make setup-peers`.
PEERS = Path(sys.prefix).with_name(f"{Path(sys.prefix).name}-peers")
LORA = Lora(rank=2, alpha=5.0)
KOHYA = f"foxes{KOHYA_SUFFIX}"


def published(folder: Path, base: Base, lora: Lora = LORA, *, texts: bool = False) -> Path:
    """A folder of published adapters for a base, in float32."""
    trained = write_adapters_of(folder.with_suffix(".safetensors"), base, lora, texts=texts)
    write_adapters(trained, base, folder, name="foxes", dtype="float32", scheduler=None)
    return folder


def added(adapters: Adapters, base: Base, *, fused: bool) -> dict[str, Any]:
    """What adapters add to a base's weights, by component and name.

    Args:
        fused: whether the denoiser has the layers of its authors' code.
    """
    weights: dict[str, Any] = {}
    for part, layers in adapters.items():
        for layer, adapter in layers.items():
            shape = (len(adapter.up), *adapter.down.shape[1:])
            delta = adapter.merged(np.zeros(shape, np.float32))
            place = base.family.kohya.place(layer, base.denoiser) if fused else None
            if place is None or part != base.family.denoiser:
                weights[f"{part}.{layer}.weight"] = delta
                continue
            name = f"{part}.{place.layer}.weight"
            rows = place.rows or len(delta)
            whole = weights.setdefault(name, np.zeros((rows, *delta.shape[1:]), np.float32))
            whole[place.first : place.first + len(delta)] = delta
    return weights


def ask_peers(requests: list[dict[str, Any]], folder: Path) -> list[Any]:
    """The answers of tests/read_with_peers.py, and last what InvokeAI warned of."""
    file = folder / "requests.json"
    file.write_text(json.dumps(requests), encoding="utf-8")
    environment = os.environ | {"PYTHONPATH": str(PEERS), "INVOKEAI_ROOT": str(folder)}
    done = python("-P", str(ROOT / "tests/read_with_peers.py"), str(file), env=environment)
    assert done.returncode == 0, done.stderr
    answers: list[Any] = json.loads(done.stdout.splitlines()[-1])
    return answers


#: (tiny base, kind of base in InvokeAI or None for LyCORIS, file, whether encoders are trained).
READ = [
    ("tiny-sd", "sd-1", KOHYA, True),
    ("whole-sdxl", "sdxl", KOHYA, True),
    ("tiny-flux", "flux", KOHYA, True),
    ("wide-flux", "flux", LORA_WEIGHTS, False),
    ("tiny-flux2", "flux2", LORA_WEIGHTS, False),
    ("tiny-qwen-image", "qwen-image", LORA_WEIGHTS, False),
    ("tiny-qwen-image", "qwen-image", KOHYA, False),
    ("tiny-z-image", "z-image", LORA_WEIGHTS, False),
    ("tiny-sd", None, KOHYA, False),
    ("tiny-qwen-image", None, KOHYA, False),
    ("tiny-z-image", None, KOHYA, False),
]


@pytest.fixture(scope="session")
def base_of(once: Any, tiny_model: Callable[[str], Path]) -> Callable[[str], Base]:
    """`base_of(name)` opens a base for adapters.

    InvokeAI assumes the blocks of the true SDXL, and the width of the true FLUX.1.
    """

    def make_sdxl(folder: Path) -> None:
        levels = ("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D")
        save_sdxl(
            folder,
            transformer_layers=(1, 2, 3),
            block_out_channels=(16, 32, 32),
            layers_per_block=2,
            attention_head_dim=(2, 4, 4),
            down_block_types=levels,
            up_block_types=tuple(name.replace("Down", "Up") for name in reversed(levels)),
        )

    def make_flux(folder: Path) -> None:
        shutil.copytree(ROOT / "bench/models/FLUX.1-dev", folder, dirs_exist_ok=True)
        file = folder / "transformer/config.json"
        config = json.loads(file.read_text(encoding="utf-8"))
        file.write_text(json.dumps(config | {"num_layers": 1, "num_single_layers": 1}))

    made = {"whole-sdxl": make_sdxl, "wide-flux": make_flux}

    def open_base(name: str) -> Base:
        return Base.open(once(name, made[name]) if name in made else tiny_model(name))

    return open_base


needs_peers = pytest.mark.skipif(not PEERS.is_dir(), reason=f"no {PEERS.name}: make setup-peers")


@needs_peers
def test_peers_add_to_weights_what_ours_add(tmp_path: Path, base_of: Callable[[str], Base]) -> None:
    requests = []
    expected = []
    for number, (name, kind, file, texts) in enumerate(READ):
        base = base_of(name)
        folder = published(tmp_path / f"{number}", base, texts=texts)
        request = {"file": f"{folder}/{file}", "base": str(base.folder), "kind": kind}
        requests.append({**request, "part": base.family.denoiser, "out": f"{folder}/added"})
        adapters = read_adapters(folder / LORA_WEIGHTS)
        expected.append(added(adapters, base, fused=kind == "flux"))
    *unused, warned = ask_peers(requests, tmp_path)
    assert not any(unused), unused
    assert not warned
    for request, ours in zip(requests, expected, strict=True):
        theirs = load_file(request["out"])
        assert theirs.keys() == ours.keys(), request
        for weight, delta in ours.items():
            np.testing.assert_allclose(theirs[weight], delta, rtol=1e-6, atol=1e-6)


#: (base of true size, kind that InvokeAI must find, files that its users are told to take).
KINDS = [
    ("stable-diffusion-xl-base-1.0", "lora sdxl", (KOHYA,)),
    ("FLUX.1-dev", "lora flux", (LORA_WEIGHTS, KOHYA)),
    ("FLUX.2-klein-base-4B", "lora flux2", (LORA_WEIGHTS,)),
    ("Qwen-Image", "lora qwen-image", (LORA_WEIGHTS, KOHYA)),
    ("Z-Image", "lora z-image", (LORA_WEIGHTS,)),
]


@needs_peers
def test_invokeai_knows_the_base_of_a_file(tmp_path: Path) -> None:
    expected = {}
    for name, kind, files in KINDS:
        base = Base.open(ROOT / "bench/models" / name)
        folder = published(tmp_path / name, base, Lora(rank=1))
        expected |= {f"{folder}/{file}": [kind] for file in files}
    *kinds, _ = ask_peers([{"file": file} for file in expected], tmp_path)
    assert dict(zip(expected, kinds, strict=True)) == expected


def test_peft_loads_every_tensor_of_the_file(tmp_path: Path, tiny_flux: Path) -> None:
    base = Base.open(tiny_flux)
    folder = published(tmp_path / "peft", base)
    with safe_open(folder / LORA_WEIGHTS, "pt") as stored:
        tensors = {name: stored.get_tensor(name) for name in stored.keys()}  # noqa: SIM118
        settings = json.loads(stored.metadata()["lora_adapter_metadata"])
    names = ("r", "lora_alpha", "target_modules")
    given = {name: settings[f"transformer.{name}"] for name in names}
    network = FluxTransformer2DModel.from_pretrained(tiny_flux / "transformer")
    before = {name: value.numpy().copy() for name, value in network.state_dict().items()}
    model = get_peft_model(network, LoraConfig(**given))
    renamed = {f"base_model.model.{n.removeprefix('transformer.')}": t for n, t in tensors.items()}
    loaded = set_peft_model_state_dict(model, renamed)
    assert not loaded.unexpected_keys
    assert not [name for name in loaded.missing_keys if ".lora_" in name]
    merged = model.merge_and_unload().state_dict()
    ours = added(read_adapters(folder / LORA_WEIGHTS), base, fused=False)
    for name, delta in ours.items():
        layer = name.removeprefix("transformer.")
        theirs = merged[layer].numpy() - before[layer]
        np.testing.assert_allclose(theirs, delta, rtol=1e-5, atol=1e-5)
