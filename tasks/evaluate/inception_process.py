"""The process that computes features of torch-fidelity's InceptionV3 (inception.py).

`python -P -m tasks.evaluate.inception_process SOCKET WEIGHTS DEVICE` has torch-fidelity on its
path. Its first message is empty, or an error. Then it answers arrays of pictures with features.
"""

from __future__ import annotations

import sys
from io import BytesIO
from multiprocessing.connection import Connection
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from configs.secrets import one_line
from runtimes.contract import WrongInput

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
        WrongInput: torch-fidelity does not load, or the file does not fit the network.
    """
    import torch

    # torchvision's operators are for CUDA: the module that registers them fails beside a CPU build
    # of PyTorch, and this network needs none.
    sys.modules["torchvision._meta_registrations"] = ModuleType("_meta_registrations")
    try:
        from torch_fidelity import feature_extractor_inceptionv3 as theirs
    except (ImportError, RuntimeError) as error:
        raise WrongInput(
            "evaluate.inception: torch-fidelity does not load: install "
            f"requirements/fidelity.txt again: {one_line(error)}"
        ) from None
    try:
        state = torch.load(weights, map_location="cpu", weights_only=True)
        theirs.load_state_dict_from_url = lambda *_, **__: state
        return theirs.FeatureExtractorInceptionV3("inception-v3-compat", [str(FEATURES)])
    except Exception as error:  # torch.load of another format raises many kinds
        raise WrongInput(
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
    except WrongInput as error:
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


if __name__ == "__main__":
    serve(Connection(int(sys.argv[1])), sys.argv[2], sys.argv[3])
