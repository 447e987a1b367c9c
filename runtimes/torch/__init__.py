"""The PyTorch runtime: CPU, CUDA, Ascend NPUs by torch_npu, Gaudi by habana_frameworks."""

import runtimes.torch_models  # noqa: F401  # sets environment variables before PyTorch is imported
