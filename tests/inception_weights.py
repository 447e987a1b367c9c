"""Weights of torch-fidelity's InceptionV3 for tests: random, since its own are on no hub."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from chips import unless_required

#: Packages of requirements/fidelity.txt: `make setup-fidelity`.
FIDELITY = Path(sys.prefix).with_name(f"{Path(sys.prefix).name}-fidelity")
#: Precedes a script that imports torch-fidelity. torchvision's own operators are for CUDA: the
#: module that registers them fails beside a CPU build of PyTorch, and no metric needs it.
IMPORTS = """
import json, sys, types
sys.modules["torchvision._meta_registrations"] = types.ModuleType("_meta_registrations")
import numpy as np, torch
"""
#: He's initialisation keeps the scale of the activations, so that features differ.
RANDOM = """
from torch_fidelity import feature_extractor_inceptionv3 as theirs

class Random(theirs.FeatureExtractorInceptionV3):
    def load_state_dict(self, *args, **kwargs):
        pass

theirs.load_state_dict_from_url = lambda *args, **kwargs: {}
torch.manual_seed(int(sys.argv[2]))
network = Random("inception-v3-compat", ["2048"])
for module in network.modules():
    if isinstance(module, torch.nn.Conv2d):
        torch.nn.init.kaiming_normal_(module.weight, nonlinearity="relu")
torch.save(network.state_dict(), sys.argv[1])
"""


def require_fidelity() -> None:
    """Skip the test without torch-fidelity, or fail it if KILN_MUST_RUN names torch-fidelity."""
    if reason := "" if FIDELITY.is_dir() else f"no {FIDELITY.name}: make setup-fidelity":
        pytest.skip(unless_required("torch-fidelity", reason))


def in_fidelity(script: str, *arguments: object) -> str:
    """Run a script with torch-fidelity on its path; the last line that it prints."""
    done = subprocess.run(
        [sys.executable, "-c", IMPORTS + script, *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": str(FIDELITY)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return (done.stdout.splitlines() or [""])[-1]


def random_weights(path: Path, seed: int) -> Path:
    """Write the weights of a random network to a file, by torch-fidelity's class."""
    in_fidelity(RANDOM, path, seed)
    return path
