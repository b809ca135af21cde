"""`python -O` leaves asserts out: nothing may rest on one."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.soak.without_asserts import outcomes


@pytest.mark.slow
def test_the_same_with_and_without_asserts():
    script = Path(__file__).with_name("without_asserts.py")
    done = subprocess.run([sys.executable, "-O", str(script)], capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    expected = outcomes()
    assert json.loads(done.stdout) == expected
    assert None not in expected["wrong"]
