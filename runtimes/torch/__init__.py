"""The PyTorch runtime: CPU, CUDA, Ascend NPUs by torch_npu, Gaudi by habana_frameworks."""

import runtimes.models  # noqa: F401  # sets what PyTorch and its libraries read once
