"""`python -m gd_plugin.vllm` prints the folder that makes vLLM find the processor by itself.

PYTHONPATH="$(python -m gd_plugin.vllm)" vllm serve MODEL
"""

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.stdout.write(f"{Path(__file__).parent / 'opt_in'}\n")
