"""The MindSpore runtime: Ascend NPU, and MindSpore's CPU backend, with the models of mindone.

mindone's modules take MindSpore's operators as they are when they are imported, so nothing here
imports it before a device has been opened (device.py).
"""

import os
import tempfile

# Read by these libraries when they are imported: what they would say is not about the job.
os.environ.setdefault("GLOG_v", "3")  # MindSpore's: errors only
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
# Where a graph that does not compile is written down; by default that is the working folder.
os.environ.setdefault("MS_OM_PATH", tempfile.gettempdir())
