"""Sizes of randomised tests, by the environment variable GD_PLUGIN_FUZZ.

"ci" (the default): few, and the same every time.     "long": many, and random.
"""

import os
from typing import TypeVar

from hypothesis import HealthCheck, settings

__all__ = ["LONG", "pick"]

LONG = os.environ.get("GD_PLUGIN_FUZZ", "ci") == "long"

T = TypeVar("T")

_COMMON = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow, HealthCheck.function_scoped_fixture]}
settings.register_profile("ci", derandomize=True, database=None, max_examples=30, **_COMMON)
settings.register_profile("long", max_examples=1000, print_blob=True, **_COMMON)


def pick(ci: T, long: T) -> T:
    """Return the value for this run's size."""
    return long if LONG else ci
