"""What every test shares. Models are built in fixtures, never while tests are collected; nothing is downloaded."""

import os

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import settings

from tests.fuzz import LONG

if TYPE_CHECKING:
    from gd_plugin import Vocabulary

settings.load_profile("long" if LONG else "ci")


@pytest.fixture(scope="session")
def smollm2_tokenizer() -> Any:
    """The real SmolLM2 tokenizer: 49,152 byte-level tokens, stop token 2, which also pads."""
    from transformers import AutoTokenizer

    from gd_plugin.testing.real_model import smollm2_folder

    try:
        folder = smollm2_folder(tokenizer_only=True)
    except ModuleNotFoundError as error:
        pytest.skip(str(error))
    return AutoTokenizer.from_pretrained(folder)


@pytest.fixture(scope="session")
def smollm2_vocabulary(smollm2_tokenizer: Any) -> "Vocabulary":
    from gd_plugin import Vocabulary

    return Vocabulary.from_tokenizer(smollm2_tokenizer)
