"""The kit of tiny models, once a run."""

from typing import Any

import pytest

from tests.hf.models import Kit


@pytest.fixture(scope="session")
def kit(smollm2_tokenizer: Any) -> Kit:
    return Kit(smollm2_tokenizer)
