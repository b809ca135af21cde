"""What every test shares. Models are built in fixtures, never while tests are collected; nothing is downloaded."""

import os

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import settings

from tests.fuzz import LONG

# Triton's own library decides when triton is imported, which xgrammar does, whether its kernels are interpreted
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

if TYPE_CHECKING:
    from gd_plugin import Vocabulary

settings.load_profile("long" if LONG else "ci")


@pytest.fixture
def spawnable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let spawned processes import the tests, which `PYTHONSAFEPATH` keeps off the path."""
    monkeypatch.syspath_prepend(str(Path(__file__).parent.parent))


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
