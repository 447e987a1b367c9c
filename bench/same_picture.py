"""Compare the pictures of all runtimes: `python -m bench.same_picture MODEL PROMPT...`.

Each runtime samples the same prompts and seed with `kiln generate`. The differences from the first
runtime are in levels of 255. The page `--out` has a row per runtime and a row with its difference,
amplified 100 times. Runtimes that are not installed are skipped. `hpu` is the emulated Gaudi of
tests/hpu_host.
"""

from __future__ import annotations

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

from bench.report import Row, finish, log, option_parser
from runtimes.registry import probe_runtime

AMPLIFICATION = 100
ENLARGEMENT = 2  # factors
LABEL_WIDTH = 72  # pixels
TESTS = Path(__file__).parents[1] / "tests"
HPU_HOST = TESTS / "hpu_host"
MINDSPORE_HOST = TESTS / "mindspore_host"
#: Name -> runtime, device, and environment variables of its process.
VARIANTS: dict[str, tuple[str, str, dict[str, str]]] = {
    "torch": ("torch", "cpu", {}),
    "xla": ("xla", "auto", {"PJRT_DEVICE": "CPU"}),
    "jax": ("jax", "cpu", {}),
    "mindspore": ("mindspore", "cpu", {"PYTHONPATH": str(MINDSPORE_HOST)}),
    "hpu": ("torch", "hpu", {"PYTHONPATH": str(HPU_HOST), "PT_HPU_LAZY_MODE": "1"}),
}
Pictures = NDArray[np.uint8]  # [N, H, W, 3]


def main(arguments: Sequence[str]) -> int:
    """Sample and compare; 1 if a runtime failed."""
    parser = option_parser("same_picture", __doc__)
    parser.add_argument("model", help="a folder, or a name with -o registry=URL")
    parser.add_argument("prompts", nargs="+")
    parser.add_argument("-o", dest="options", action="append", default=[], metavar="NAME=VALUE")
    parser.add_argument("--out", type=Path, help="PNG to write")
    options = parser.parse_args(arguments)
    rows = []
    sampled = dict[str, Pictures]()
    with tempfile.TemporaryDirectory(prefix="kiln-bench-") as folder:
        for name, (runtime, device, variables) in VARIANTS.items():
            probe = probe_runtime(runtime)
            if not probe.available:
                rows.append(Row(name, skipped=probe.reason))
                continue
            log(f"{name} ...")
            # One store each: the device is not in the key, so pictures would be reused.
            settings = [f"runtime={runtime}", f"device={device}", f"store={folder}/store-{name}"]
            settings += options.options
            out = Path(folder) / name
            try:
                sampled[name] = _sample(options.model, options.prompts, settings, variables, out)
                reference = next(iter(sampled.values()))
                rows.append(Row(name, figures=_compare(sampled[name], reference)))
            except (subprocess.CalledProcessError, ValueError) as error:
                rows.append(Row(name, failed=str(getattr(error, "stderr", error))[-500:]))
    if options.out is not None and sampled:
        _page(sampled).save(options.out)
    return finish("same_picture", rows, options)


def _sample(
    model: str,
    prompts: Sequence[str],
    settings: Sequence[str],
    variables: dict[str, str],
    folder: Path,
) -> Pictures:
    command = [sys.executable, "-m", "flows.cli", "generate", model, *prompts, "--json"]
    command += ["--out", str(folder)] + [part for setting in settings for part in ("-o", setting)]
    paths = [variables.get("PYTHONPATH", ""), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, **variables, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    done = subprocess.run(command, check=True, capture_output=True, text=True, env=environment)
    samples = Path(json.loads(done.stdout.splitlines()[-1])["folder"]) / "samples"
    return np.stack([np.asarray(Image.open(path)) for path in sorted(samples.iterdir())])


def _compare(pictures: Pictures, reference: Pictures) -> dict[str, Any]:
    difference = np.abs(pictures.astype(np.int16) - reference)
    return {
        "pictures": len(pictures),
        "max_difference_levels": int(difference.max()),
        "different_fraction": float((difference > 0).mean()),
    }


def _page(sampled: Mapping[str, Pictures]) -> Image.Image:
    """A row of enlarged pictures per runtime, and of its differences from the first."""
    reference = next(iter(sampled.values()))
    lines: list[tuple[str, Pictures]] = []
    for name, pictures in sampled.items():
        lines.append((name, pictures))
        if pictures is not reference:
            difference = np.abs(pictures.astype(np.int16) - reference) * AMPLIFICATION
            lines.append(("difference", difference.clip(0, 255).astype(np.uint8)))
    _, height, width, _ = reference.shape
    size = (LABEL_WIDTH + ENLARGEMENT * width * len(reference), ENLARGEMENT * height * len(lines))
    page = Image.new("RGB", size, "white")
    for number, (name, pictures) in enumerate(lines):
        top = ENLARGEMENT * height * number
        ImageDraw.Draw(page).text((4, top + 4), name, fill="black")
        strip = Image.fromarray(np.concatenate(list(pictures), axis=1))
        wide = (ENLARGEMENT * strip.width, ENLARGEMENT * strip.height)
        page.paste(strip.resize(wide, Image.Resampling.NEAREST), (LABEL_WIDTH, top))
    return page


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
