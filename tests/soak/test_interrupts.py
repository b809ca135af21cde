"""Interrupts (Ctrl-C) at random moments of a compilation and of a generate: afterwards all is as if there had been none."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.fuzz import pick

pytestmark = pytest.mark.timeout(pick(120, 7200))
SCRIPT = Path(__file__).with_name("interrupted.py")


@pytest.mark.slow
@pytest.mark.parametrize(("what", "ci", "long"), [("compile", 20, 500), ("generate", 6, 500)])
@pytest.mark.parametrize("seed", range(pick(1, 2)))
def test_what_was_interrupted_is_usable(what, ci, long, seed):
    number = pick(ci, long)
    # a process group of its own, all of which is interrupted at the end
    process = subprocess.Popen(
        [sys.executable, str(SCRIPT), what, str(number), str(seed)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        output, errors = process.communicate(timeout=pick(100, 3600))
    finally:
        process.kill()
    assert process.returncode == 0, errors
    assert output.endswith(" interrupted\n") and int(output.split()[0]) >= number // 4
