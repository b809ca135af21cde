"""Tokenizers of every make, each against its own decoding."""

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gd_plugin.errors import VocabularyError
from gd_plugin.grammars.tokenizers import read_tokenizer
from gd_plugin.grammars.vocabulary import Vocabulary

TEXTS = [
    'He said: {"name": "Zoë", "n": [1, 2.50, -3e4]}\r\n',
    "naïve café — 漢字かな交じり文 한국어 🙂👩‍👩‍👧",
    "    indented\n\n\ttabs \u00a0 and \u2009 spaces",
    "русский ελληνικά עברית العربية हिन्दी ไทย",
]


def test_byte_level(smollm2: Any) -> None:
    vocabulary = Vocabulary.from_tokenizer(smollm2, stop_token_ids=[2])
    assert vocabulary.vocab_size == 49152
    assert len(vocabulary.special_token_ids) == 17
    assert vocabulary.special_token_names["<|im_end|>"] == 2
    for text in TEXTS:
        assert vocabulary.decode(smollm2.encode(text).ids).decode() == text


def test_transformers_fast(deepseek: Any) -> None:
    vocabulary = Vocabulary.from_tokenizer(deepseek)
    assert vocabulary.vocab_size == 129280
    assert vocabulary.stop_token_ids == (1,)
    for text in TEXTS:
        assert vocabulary.decode(deepseek.encode(text, add_special_tokens=False)).decode() == text
    # added and special: no text; added and not special: text
    assert vocabulary.token_bytes(vocabulary.special_token_names["<｜begin▁of▁sentence｜>"]) == b""
    user = deepseek.convert_tokens_to_ids("<｜User｜>")
    assert vocabulary.token_bytes(user) == "<｜User｜>".encode()


def test_folder_and_json_file_and_json_text(deepseek: Any, tmp_path: Path) -> None:
    deepseek.save_pretrained(tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 128801]}))
    expected = Vocabulary.from_tokenizer(deepseek).tokens
    folder = Vocabulary.from_tokenizer(tmp_path)
    assert folder.stop_token_ids == (1, 128801)
    file = Vocabulary.from_tokenizer(str(tmp_path / "tokenizer.json"))
    assert file.stop_token_ids == (1, 128801)
    text = Vocabulary.from_tokenizer((tmp_path / "tokenizer.json").read_text(), stop_token_ids=1)
    assert text.stop_token_ids == (1,)
    assert folder.tokens == file.tokens[: folder.vocab_size] == text.tokens[: folder.vocab_size] == expected


def test_tiktoken(qwen_ranks: Path) -> None:
    tiktoken = pytest.importorskip("tiktoken", reason="needs the package tiktoken")
    ranks = {token: i for i, token in enumerate(read_tokenizer(qwen_ranks).tokens) if token is not None}
    encoding = tiktoken.Encoding(
        "qwen",
        pat_str=r"\s+|\w+|[^\s\w]+",
        mergeable_ranks=ranks,
        special_tokens={"<|endoftext|>": 151643, "<|x|>": 151700},
    )
    vocabulary = Vocabulary.from_tokenizer(encoding, vocab_size=151936)
    assert vocabulary.vocab_size == 151936
    assert vocabulary.stop_token_ids == (151643,)
    # holes, special tokens and padding have no text
    assert vocabulary.special_token_ids == frozenset(range(151643, 151936))
    for text in TEXTS:
        assert vocabulary.decode(encoding.encode_ordinary(text)).decode() == text


@pytest.mark.parametrize("name", ["tekken_240718.json", "tekken_240911.json"])
def test_tekken(mistral_data: Path, name: str) -> None:
    from mistral_common.tokens.tokenizers.tekken import Tekkenizer

    tokenizer = Tekkenizer.from_file(str(mistral_data / name))
    vocabulary = Vocabulary.from_tokenizer(tokenizer)
    assert (vocabulary.vocab_size, vocabulary.stop_token_ids) == (131072, (2,))
    assert len(vocabulary.special_token_ids) == 1000
    for text in TEXTS:
        assert vocabulary.decode(tokenizer.encode(text, bos=False, eos=False)).decode() == text
    assert Vocabulary.from_tokenizer(mistral_data / name).tokens == vocabulary.tokens


@pytest.mark.parametrize(
    ("name", "size"),
    [
        ("tokenizer.model.v1", 32000),
        ("mistral_instruct_tokenizer_240216.model.v2", 32768),
        ("mistral_instruct_tokenizer_240323.model.v3", 32768),
        ("mistral_instruct_tokenizer_241114.model.v7", 32768),
    ],
)
def test_sentencepiece(mistral_data: Path, name: str, size: int) -> None:
    sentencepiece = pytest.importorskip("sentencepiece", reason="needs the package sentencepiece")
    processor = sentencepiece.SentencePieceProcessor(model_file=str(mistral_data / name))
    vocabulary = Vocabulary.from_tokenizer(processor)
    assert (vocabulary.vocab_size, vocabulary.stop_token_ids) == (size, (2,))
    assert vocabulary.token_bytes(processor.piece_to_id("<0x0A>")) == b"\n"
    assert vocabulary.token_bytes(processor.piece_to_id("▁the")) == b" the"
    for text in TEXTS:
        # the model puts a space in front of a document
        assert vocabulary.decode(processor.encode(text)).decode() in (
            processor.decode(processor.encode(text)),
            " " + text,
        )


def test_mistral_common_wrapper(mistral_data: Path) -> None:
    from mistral_common.tokens.tokenizers.mistral import MistralTokenizer

    wrapped = MistralTokenizer.from_file(str(mistral_data / "mistral_instruct_tokenizer_240323.model.v3"))
    assert Vocabulary.from_tokenizer(wrapped).vocab_size == 32768


def test_slow_tokenizer_of_bytes() -> None:
    from transformers import ByT5Tokenizer

    tokenizer = ByT5Tokenizer()
    vocabulary = Vocabulary.from_tokenizer(tokenizer)
    for text in TEXTS:
        assert vocabulary.decode(tokenizer.encode(text, add_special_tokens=False)).decode() == text


def toy(model: Any, decoder: Any) -> Any:
    tokenizers = pytest.importorskip("tokenizers")
    tokenizer = tokenizers.Tokenizer(model)
    if decoder is not None:
        tokenizer.decoder = decoder
    return tokenizer


def words(*texts: str) -> Any:
    from tokenizers import models

    return models.WordLevel({text: i for i, text in enumerate(texts)}, unk_token=texts[0])


def decoder_named(name: str) -> Any:
    from tokenizers import decoders

    made: dict[str, Callable[[], Any]] = {
        "none": lambda: None,
        "byte level": decoders.ByteLevel,
        "metaspace": decoders.Metaspace,
        "word piece": lambda: decoders.WordPiece(cleanup=False),
        "byte fallback": lambda: decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        ),
        "no byte fallback": lambda: decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse()]),
    }
    return made[name]()


DECODERS = [
    # decoder, token, its bytes in the middle of a document
    ("none", "x", b" x"),
    ("byte level", "Ġx", b" x"),
    ("byte level", "Ã", b"\xc3"),
    ("byte level", "two words", b"two words"),
    ("byte level", "<｜x｜>", "<｜x｜>".encode()),
    ("metaspace", "▁x", b" x"),
    ("word piece", "##x", b"x"),
    ("word piece", "x", b" x"),
    ("byte fallback", "▁x", b" x"),
    ("byte fallback", "<0xE9>", b"\xe9"),
    ("byte fallback", "<0xE9", b"<0xE9"),
    ("no byte fallback", "<0xE9>", b"<0xE9>"),
]


@pytest.mark.parametrize(("decoder", "token", "expected"), DECODERS)
def test_the_decoder_decides(decoder: str, token: str, expected: bytes) -> None:
    tokenizer = toy(words("a", token), decoder_named(decoder))
    assert Vocabulary.from_tokenizer(tokenizer, stop_token_ids=[0]).token_bytes(1) == expected


def test_added_tokens_and_holes() -> None:
    from tokenizers import AddedToken, decoders, models

    tokenizer = toy(models.BPE(vocab={"a": 0, "b": 1, "Ġ": 5}, merges=[]), decoders.ByteLevel())
    tokenizer.add_tokens(["<tool>"])
    tokenizer.add_special_tokens([AddedToken("<eos>", special=True)])
    ids = {text: tokenizer.token_to_id(text) for text in ("<tool>", "<eos>")}
    vocabulary = Vocabulary.from_tokenizer(tokenizer, stop_token_ids=ids["<eos>"], vocab_size=40)
    assert vocabulary.token_bytes(ids["<tool>"]) == b"<tool>"
    assert vocabulary.token_bytes(ids["<eos>"]) == b""
    # the ids between the model's own are holes, or hold what was added
    assert set(range(40)) - {0, 1, 5, ids["<tool>"]} == vocabulary.special_token_ids
    with pytest.raises(VocabularyError, match="outside"):
        Vocabulary.from_tokenizer(tokenizer, stop_token_ids=ids["<eos>"], vocab_size=2)


def test_a_table_that_lies_is_shown() -> None:
    """A decoder that depends on what stands before it has no table."""
    from tokenizers import decoders

    tokenizer = toy(words("a", "x", "b"), decoders.Sequence([decoders.Fuse(), decoders.Replace("xb", "!")]))
    with pytest.raises(VocabularyError, match=r"does not reproduce .*'(axb|xb)' by the table and '(a!|!)'"):
        Vocabulary.from_tokenizer(tokenizer, stop_token_ids=[0])


UNREADABLE: list[Any] = [
    None,
    5,
    object(),
    ["a"],
    {},
    "",
    "/no/such/folder",
    "{}",
    '{"version": "1.0"}',
    "\0",
    "{" * 5000,
]


@pytest.mark.parametrize("tokenizer", UNREADABLE, ids=lambda tokenizer: type(tokenizer).__name__)
def test_what_cannot_be_read_is_refused(tokenizer: Any) -> None:
    with pytest.raises(VocabularyError):
        Vocabulary.from_tokenizer(tokenizer, stop_token_ids=[0])


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer.model", "ranks.tiktoken"])
def test_broken_files_are_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(random.Random(0).randbytes(200))
    with pytest.raises(VocabularyError):
        Vocabulary.from_tokenizer(tmp_path / name, stop_token_ids=[0])
