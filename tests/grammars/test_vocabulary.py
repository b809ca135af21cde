"""Vocabulary: widths, holes, stop tokens, bad input, copies."""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from gd_plugin.errors import VocabularyError
from gd_plugin.grammars.vocabulary import Vocabulary

TOKENS: list[bytes | None] = [b"a", b"b", b"a", None, b"", b"\xc3"]


def test_ids_without_text_are_special() -> None:
    vocabulary = Vocabulary.from_bytes(TOKENS, stop_token_ids=[3], special_token_ids=[1], vocab_size=9)
    assert vocabulary.tokens == (b"a", b"", b"a", b"", b"", b"\xc3", b"", b"", b"")
    assert vocabulary.special_token_ids == {1, 3, 4, 6, 7, 8}
    assert vocabulary.decode([0, 1, 5, 8, 2]) == b"a\xc3a"


def test_a_narrower_model_cuts() -> None:
    vocabulary = Vocabulary.from_bytes(TOKENS, stop_token_ids=[1], vocab_size=3)
    assert vocabulary.tokens == (b"a", b"b", b"a")
    with pytest.raises(IndexError):
        vocabulary.token_bytes(3)
    with pytest.raises(IndexError):
        vocabulary.token_bytes(-1)


@pytest.mark.parametrize(
    "stops", [[2, 0], (0, 2, 2), {0, 2}, np.array([2, 0]), torch.tensor([2, 0]), iter([0, 2]), [np.int64(0), 2]]
)
def test_stop_tokens_of_any_integer_type(stops: Any) -> None:
    vocabulary = Vocabulary.from_bytes(TOKENS, stop_token_ids=stops)
    assert vocabulary.stop_token_ids == (0, 2)
    assert all(type(i) is int for i in vocabulary.stop_token_ids)


BAD: list[tuple[str, Callable[[], Any]]] = [
    ("no stop token", lambda: Vocabulary.from_bytes(TOKENS, stop_token_ids=[])),
    ("stop token 6 is outside", lambda: Vocabulary.from_bytes(TOKENS, stop_token_ids=[6])),
    ("stop token -1 is outside", lambda: Vocabulary.from_bytes(TOKENS, stop_token_ids=[-1])),
    ("stop token 4 is outside", lambda: Vocabulary.from_bytes(TOKENS, stop_token_ids=[4], vocab_size=3)),
    ("stop_token_ids must be token ids", lambda: Vocabulary.from_bytes(TOKENS, stop_token_ids=["0"])),  # type: ignore[list-item]
    ("stop_token_ids must be token ids", lambda: Vocabulary.from_bytes(TOKENS, stop_token_ids=[1.5])),  # type: ignore[list-item]
    ("token 0 must be bytes", lambda: Vocabulary.from_bytes(["a"], stop_token_ids=[0])),  # type: ignore[list-item]
    ("no token has any text", lambda: Vocabulary.from_bytes([b"a", None], stop_token_ids=[0])),
    ("is empty", lambda: Vocabulary.from_bytes([], stop_token_ids=[0])),
    ("is empty", lambda: Vocabulary.from_bytes(TOKENS, stop_token_ids=[0], vocab_size=0)),
    ("must be a number", lambda: Vocabulary.from_bytes(TOKENS, stop_token_ids=[0], vocab_size="3")),  # type: ignore[arg-type]
    ("at most", lambda: Vocabulary.from_bytes(TOKENS, stop_token_ids=[0], vocab_size=10**12)),
]


@pytest.mark.parametrize(("message", "build"), BAD)
def test_bad_input(message: str, build: Callable[[], Any]) -> None:
    with pytest.raises(VocabularyError, match=message):
        build()


def test_stop_tokens_are_a_union(deepseek: Any) -> None:
    assert Vocabulary.from_tokenizer(deepseek, stop_token_ids=[7]).stop_token_ids == (1, 7)
    assert Vocabulary.from_tokenizer(deepseek, stop_token_ids=7).stop_token_ids == (1, 7)


def test_fingerprint_follows_what_decides_a_mask() -> None:
    base = Vocabulary.from_bytes(TOKENS, stop_token_ids=[3])
    assert base.fingerprint == Vocabulary.from_bytes(list(TOKENS), stop_token_ids=[3]).fingerprint
    others = [
        Vocabulary.from_bytes(TOKENS, stop_token_ids=[4]),
        Vocabulary.from_bytes(TOKENS, stop_token_ids=[3], vocab_size=7),
        Vocabulary.from_bytes([b"ab", b"", *TOKENS[2:]], stop_token_ids=[3]),
        # a marker of reasoning may be such a token
        Vocabulary(TOKENS, stop_token_ids=[3], special_token_names={"</think>": 1}),
    ]
    assert len({base.fingerprint, *(other.fingerprint for other in others)}) == 5


def test_copies_are_the_same_object() -> None:
    vocabulary = Vocabulary.from_bytes(TOKENS, stop_token_ids=[3])
    assert copy.copy(vocabulary) is vocabulary
    assert copy.deepcopy({"kept": [vocabulary]})["kept"][0] is vocabulary


def test_a_pickle_is_an_equal_vocabulary() -> None:
    vocabulary = Vocabulary(
        [*TOKENS, b"</s>"], stop_token_ids=[3, 6], special_token_ids=[1], special_token_names={"<x>": 3}, vocab_size=9
    )
    twin = pickle.loads(pickle.dumps(vocabulary))
    assert twin.fingerprint == vocabulary.fingerprint
    for name in ("tokens", "vocab_size", "stop_token_ids", "special_token_ids", "stop_words", "tail_word"):
        assert getattr(twin, name) == getattr(vocabulary, name), name
    assert dict(twin.special_token_names) == {"<x>": 3}
    with pytest.raises(TypeError):
        twin.special_token_names["<y>"] = 1


@pytest.mark.parametrize("ids", [[1.5], [1.0], "12", b"12", ["1"], True, [True], 1.5, [None], [[1]], object()])
@pytest.mark.parametrize("name", ["stop_token_ids", "special_token_ids"])
def test_ids_that_are_no_whole_numbers(name: str, ids: Any) -> None:
    given = {"stop_token_ids": [2], name: ids}
    with pytest.raises(VocabularyError, match=f"{name} must be token ids"):
        Vocabulary.from_bytes([b"a", b"b", None], **given)


def test_ids_of_other_integer_types() -> None:
    for ids in (2, np.int64(2), np.array([2]), (2,), {2}, iter([2]), torch.tensor([2])):
        assert Vocabulary.from_bytes([b"a", b"b", None], stop_token_ids=ids).stop_token_ids == (2,)
