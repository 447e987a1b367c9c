"""Encode in the environment of a runtime: encode_with.py JOB.json IN.npz OUT.npz."""

import json
import sys

import numpy as np

from runtimes.process.job import EncodeJob
from runtimes.registry import open_encoder

job, given, found = sys.argv[1:]
with open(job) as stream:
    encoder = open_encoder(EncodeJob(**json.load(stream)))
arrays = np.load(given)
answers = {}
for count in (4, 3):
    mean, logvar = encoder.images(arrays["pixels"][:count])
    states, pooled = encoder.texts(arrays["captions"][: count - 1].tolist())
    answers |= {f"mean{count}": mean, f"logvar{count}": logvar, f"states{count}": states}
    if pooled is not None:
        answers[f"pooled{count}"] = pooled
np.savez(found, **answers)
