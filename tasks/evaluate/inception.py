"""Features of torch-fidelity's InceptionV3; a process of its own computes them.

The process is `python -P -m tasks.evaluate.inception SOCKET WEIGHTS DEVICE`, with torch-fidelity on
its path. Its first message is empty, or an error. Then it answers arrays of pictures with features.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from io import BytesIO
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from configs.errors import Refused
from configs.secrets import one_line, without_secrets
from tasks.child_process import ConnectedProcess
from tasks.evaluate.features import BATCH, Float32, Picture, batches

FEATURES = 2048  # of the last pooling


def bytes_of(array: NDArray[Any]) -> bytes:
    """An array in NumPy's file format."""
    stream = BytesIO()
    np.save(stream, array, allow_pickle=False)
    return stream.getvalue()


def array_of(data: bytes) -> NDArray[Any]:
    """The array of `bytes_of`."""
    return np.asarray(np.load(BytesIO(data), allow_pickle=False))


def open_inception(weights: str) -> Any:
    """torch-fidelity's InceptionV3 with the weights of a file, on the CPU.

    The file is read as tensors alone: torch-fidelity itself would run code that is pickled there.

    Raises:
        Refused: torch-fidelity does not load, or the file does not fit the network.
    """
    import torch

    # torchvision's operators are for CUDA: the module that registers them fails beside a CPU build
    # of PyTorch, and this network needs none.
    sys.modules["torchvision._meta_registrations"] = ModuleType("_meta_registrations")
    try:
        from torch_fidelity import feature_extractor_inceptionv3 as theirs
    except (ImportError, RuntimeError) as error:
        raise Refused(
            "evaluate.inception: torch-fidelity does not load: install "
            f"requirements/fidelity.txt again: {one_line(error)}"
        ) from None
    try:
        state = torch.load(weights, map_location="cpu", weights_only=True)
        theirs.load_state_dict_from_url = lambda *_, **__: state
        return theirs.FeatureExtractorInceptionV3("inception-v3-compat", [str(FEATURES)])
    except Exception as error:  # torch.load of another format raises many kinds
        raise Refused(
            f"evaluate.inception: {weights} has no weights of torch-fidelity's InceptionV3:"
            f" {one_line(error)}"
        ) from None


def serve(connection: Connection, weights: str, device: str) -> None:
    """Answer pictures u8 [N, H, W, 3] with features f32 [N, 2048], to the end of the socket."""
    import torch

    from runtimes.torch.device import choose_device

    try:
        # One process owns a Gaudi, and the sampling processes need it.
        where = choose_device("auto" if device.startswith("hpu") else device)
        network = open_inception(weights).to(where)
    except Refused as error:
        connection.send_bytes(str(error).encode())
        return
    connection.send_bytes(b"")
    while True:
        try:
            pictures = array_of(connection.recv_bytes())
        except EOFError:
            return
        with torch.inference_mode():
            pixels = torch.from_numpy(pictures).permute(0, 3, 1, 2).to(where)
            (features,) = network(pixels)
        connection.send_bytes(bytes_of(features.cpu().numpy()))


#: Suffix of the folder that `make setup-fidelity` and the images of deploy/ fill.
ENVIRONMENT = "-fidelity"


def fidelity_folder() -> Path:
    """The folder of torch-fidelity's packages. Raises Refused if it is not installed."""
    folder = Path(sys.prefix + ENVIRONMENT)
    if not (folder / "torch_fidelity").is_dir():
        raise Refused(
            "evaluate.inception: torch-fidelity is not installed: run `make setup-fidelity`, or "
            "outside of .venv `python -m pip install --no-deps --target "
            f"{folder} --requirement requirements/fidelity.txt`"
        )
    return folder


def check_inception(weights: Path, named: str) -> None:
    """Load a weights file once, on the CPU.

    Args:
        weights: local copy of the file.
        named: the file in the recipe.

    Raises:
        Refused: it does not load.
    """
    try:
        Inception(weights, "cpu").close()
    except Refused as error:
        raise Refused(str(error).replace(str(weights), without_secrets(named))) from None


class Inception:
    """torch-fidelity's InceptionV3, the network of FID, up to its last pooling.

    Its process alone has torch-fidelity's torchvision on its path: transformers would use that,
    too. The process ends when this object is closed or collected.

    Args:
        weights: file in the layout of torch-fidelity's weights-inception-2015-12-05-6726825d.pth.
        device: as for Clip.

    Raises:
        Refused: torch-fidelity is not installed, or the file is no such weights file.
        ProcessLost: the process ended.
    """

    def __init__(self, weights: Path, device: str = "auto") -> None:
        paths = (str(fidelity_folder()), os.environ.get("PYTHONPATH", ""))
        self._process = ConnectedProcess(
            "evaluate.inception: its process",
            "tasks.evaluate.inception",
            [str(weights), device],
            environment={"PYTHONPATH": os.pathsep.join(filter(None, paths))},
        )
        if message := self._process.receive().decode():
            self.close()
            raise Refused(message)

    def images(self, pictures: Iterable[Picture]) -> Float32:
        """Features f32 [N, 2048], not normalised. Picture sizes may differ.

        The network itself resizes pictures to 299 x 299, as TensorFlow 1 did, and scales them.
        """
        all_pictures = list(pictures)
        by_size: dict[tuple[int, ...], list[int]] = {}
        for number, picture in enumerate(all_pictures):
            by_size.setdefault(picture.shape, []).append(number)
        features = np.zeros((len(all_pictures), FEATURES), np.float32)
        for numbers in by_size.values():
            for batch in batches(numbers, BATCH):
                stacked = np.stack([all_pictures[number] for number in batch])
                features[batch] = array_of(self._process.ask(bytes_of(stacked)))
        return features

    def close(self) -> None:
        """End the process."""
        self._process.close()


if __name__ == "__main__":
    serve(Connection(int(sys.argv[1])), sys.argv[2], sys.argv[3])
