"""An encoder process of this runtime."""

import sys

from tasks.encode.encoder_process import serve

serve([int(number) for number in sys.argv[1:]])
