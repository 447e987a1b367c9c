"""The MindSpore runtime: Ascend NPUs, with the models of mindone."""

import os
import tempfile

# These libraries read the variables at import. Their warnings do not concern the user's job.
os.environ.setdefault("GLOG_v", "3")  # MindSpore logs errors only
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
# Folder for dumps of graphs that fail to compile; the default is the working directory.
os.environ.setdefault("MS_OM_PATH", tempfile.gettempdir())
