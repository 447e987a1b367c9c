"""Run in the environment of runtime mindspore: pictures by each of some schedulers, as floats.

python draw_driver.py MODEL FOLDER SETTINGS     writes FOLDER/<scheduler>.npy

SETTINGS is a JSON object: `schedulers`, their `config`, `prompts`, `sampler`. Prints, as JSON, what
those say that cannot draw here.
"""

import json
import sys
from pathlib import Path

import mindspore as ms
import numpy as np

from runtimes.base import WrongInput
from runtimes.job import Drawing
from runtimes.mindspore.device import start


def main(model: Path, folder: Path, settings: str) -> None:
    given, wrong = json.loads(settings), {}
    start("cpu")
    from runtimes.mindspore.generate import Sampler, load_network, make_scheduler

    network = load_network(Drawing(str(folder)), model, ms.float32)
    sampler = Sampler(model, network.parts, ms.float32)
    for name in given["schedulers"]:
        sampler.use({"scheduler": make_scheduler({**given["config"], "_class_name": name})})
        try:
            drawn = np.concatenate(
                list(sampler.draw_floats(given["prompts"], given["sampler"], first=0))
            )
        except WrongInput as error:
            wrong[name] = str(error)
        else:
            np.save(folder / f"{name}.npy", drawn)
    print(json.dumps(wrong))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3])
