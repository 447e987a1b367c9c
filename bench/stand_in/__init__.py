"""A runtime whose encoders need a fixed time per batch and no processor, as an accelerator does."""

from runtimes.registry import RUNTIMES, RuntimeSpec

NAME = "stand-in"
#: `exclusive`: one device has a process of its own, too.
RUNTIMES[NAME] = RuntimeSpec("bench.stand_in", (), exclusive=True)
