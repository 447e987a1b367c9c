"""One prompt and seed on every runtime: `python -m bench.same_picture MODEL PROMPT...`.

Each draws the prompts with `kiln generate`. What differs from the first is told in levels of
255, and shown in `--out`: a row for each runtime, and below it the difference, 100 times as large.
Runtimes that are not installed are left out; `hpu` is the emulated Gaudi of tests/hpu_host.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw

from bench.report import Row, machine, publish, say, versions
from runtimes.registry import probe_runtime

AMPLIFIED = 100
ENLARGED, LABEL = 2, 72  # times, pixels
HPU_HOST = Path(__file__).parents[1] / "tests" / "hpu_host"
#: Who draws: runtime, device, and what its process has in its environment.
DRAWERS: dict[str, tuple[str, str, dict[str, str]]] = {
    "torch": ("torch", "cpu", {}),
    "xla": ("xla", "auto", {"PJRT_DEVICE": "CPU"}),
    "jax": ("jax", "cpu", {}),
    "mindspore": ("mindspore", "cpu", {}),
    "hpu": ("torch", "hpu", {"PYTHONPATH": str(HPU_HOST), "PT_HPU_LAZY_MODE": "1"}),
}
Pictures = NDArray[np.uint8]  # [N, H, W, 3]


def main(arguments: Sequence[str]) -> int:
    """Draw and compare; 1 if one of them failed."""
    parser = argparse.ArgumentParser(prog="python -m bench.same_picture", description=__doc__)
    parser.add_argument("model", help="a folder, or a name with -o registry=URL")
    parser.add_argument("prompts", nargs="+")
    parser.add_argument("-o", dest="options", action="append", default=[], metavar="NAME=VALUE")
    parser.add_argument("--out", type=Path, help="PNG to write")
    options = parser.parse_args(arguments)
    rows, drawn = [], dict[str, Pictures]()
    with tempfile.TemporaryDirectory(prefix="kiln-bench-") as folder:
        for name, (runtime, device, more) in DRAWERS.items():
            found = probe_runtime(runtime)
            if not found.available:
                rows.append(Row(name, left_out=found.reason))
                continue
            say(f"{name} ...")
            # A store for each: which device draws is no reason to draw again.
            given = [f"runtime={runtime}", f"device={device}", f"store={folder}/store-{name}"]
            given += options.options
            out = Path(folder) / name
            try:
                drawn[name] = _draw(options.model, options.prompts, given, more, out)
                reference = next(iter(drawn.values()))
                rows.append(Row(name, figures=_compared(drawn[name], reference)))
            except (subprocess.CalledProcessError, ValueError) as error:
                rows.append(Row(name, failed=str(getattr(error, "stderr", error))[-500:]))
    if options.out is not None and drawn:
        _page(drawn).save(options.out)
    facts = {"machine": machine(os.cpu_count() or 1), "versions": versions()}
    publish("same_picture", rows, facts, None)
    return int(any(row.failed for row in rows))


def _draw(
    model: str, prompts: Sequence[str], given: Sequence[str], more: dict[str, str], folder: Path
) -> Pictures:
    command = [sys.executable, "-m", "flows.cli", "generate", model, *prompts, "--json"]
    command += ["--out", str(folder)] + [part for option in given for part in ("-o", option)]
    paths = [more.get("PYTHONPATH", ""), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, **more, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    done = subprocess.run(command, check=True, capture_output=True, text=True, env=environment)
    samples = Path(json.loads(done.stdout.splitlines()[-1])["folder"]) / "samples"
    return np.stack([np.asarray(Image.open(path)) for path in sorted(samples.iterdir())])


def _compared(pictures: Pictures, reference: Pictures) -> dict[str, Any]:
    apart = np.abs(pictures.astype(np.int16) - reference)
    return {
        "pictures": len(pictures),
        "most_levels_apart": int(apart.max()),
        "share_of_values_apart": float((apart > 0).mean()),
    }


def _page(drawn: Mapping[str, Pictures]) -> Image.Image:
    """Each one's pictures, enlarged, and below those of all but the first how they differ."""
    reference = next(iter(drawn.values()))
    lines: list[tuple[str, Pictures]] = []
    for name, pictures in drawn.items():
        lines.append((name, pictures))
        if pictures is not reference:
            apart = np.abs(pictures.astype(np.int16) - reference) * AMPLIFIED
            lines.append(("difference", apart.clip(0, 255).astype(np.uint8)))
    _, height, width, _ = reference.shape
    size = (LABEL + ENLARGED * width * len(reference), ENLARGED * height * len(lines))
    page = Image.new("RGB", size, "white")
    for number, (name, pictures) in enumerate(lines):
        top = ENLARGED * height * number
        ImageDraw.Draw(page).text((4, top + 4), name, fill="black")
        strip = Image.fromarray(np.concatenate(list(pictures), axis=1))
        wide = (ENLARGED * strip.width, ENLARGED * strip.height)
        page.paste(strip.resize(wide, Image.Resampling.NEAREST), (LABEL, top))
    return page


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
