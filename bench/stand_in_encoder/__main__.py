"""An encoder process of this runtime."""

import sys

from bench.stand_in_encoder import registered
from tasks.devices.processes import serve

with registered():
    serve([int(number) for number in sys.argv[1:]])
