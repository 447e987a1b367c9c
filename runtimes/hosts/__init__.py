"""What a host has: memory, a C compiler, and drivers of NVIDIA GPUs, Ascend NPUs or Gaudi."""
