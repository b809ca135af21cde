"""Kernels here run in Triton's interpreter, which takes a kernel's place when its module is imported."""

import os
from importlib.util import find_spec

os.environ["TRITON_INTERPRET"] = "1"

# the definitions are tested everywhere, the kernels where triton exists
collect_ignore = [] if find_spec("triton") else ["test_logits_bitmask.py", "test_masked_argmax.py", "test_aot.py"]
