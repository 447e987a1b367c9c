"""Backend hccl of torch.distributed, for device hpu."""

from device_emulator import hccl

hccl.register("hpu")
