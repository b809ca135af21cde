"""Vocabulary: what each token id spells, which ids stop a row, and how wide a row is.

In:  a tokenizer of any make (read by tokenizers.py), or the bytes themselves.
Out: an immutable table id -> bytes shared by every matcher of a model.
Text means `Vocabulary.decode(ids)`: the bytes as in the middle of a document; special tokens have none.
"""

import hashlib
import reprlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from operator import index
from types import MappingProxyType
from typing import Any, Final

import numpy as np

from gd_plugin.errors import VocabularyError

__all__ = ["Vocabulary", "checked_ids", "checked_size", "text_of"]


class Vocabulary:
    """Token id -> bytes, stop ids, special ids, width. Immutable and safe to share between threads.

    Attributes:
        vocab_size: columns of the model's logits; ids from the tokenizer's end to here have no text.
        stop_token_ids: ids that end a row, sorted, at least one.
        stop_token_set: the same as a set.
        special_token_ids: ids below `vocab_size` without text: never legal inside text. Includes holes and padding, and
            excludes nothing but text tokens; a stop token that has no text of its own is among them.
        special_token_names: text of a special token as the tokenizer writes it -> id.
        tokens: bytes of each id; b"" for ids without text.
        encode: text -> the tokenizer's own ids for it, no special tokens added; None without a tokenizer, and in copies
            that have crossed a process.

    Raises:
        VocabularyError: no token, no stop token, or an id outside the columns.
    """

    def __init__(
        self,
        tokens: Sequence[bytes | None],
        *,
        stop_token_ids: Iterable[int],
        special_token_ids: Iterable[int] = (),
        special_token_names: Mapping[str, int] | None = None,
        vocab_size: int | None = None,
    ) -> None:
        self.encode: Callable[[str], Sequence[int]] | None = None
        self.vocab_size = len(tokens) if vocab_size is None else checked_size(vocab_size)
        if self.vocab_size < 1:
            raise VocabularyError("the vocabulary is empty; pass at least one token")
        special = frozenset(checked_ids(special_token_ids, "special_token_ids"))
        width = self.vocab_size
        texts = [b"" if token is None or i in special else bytes(token) for i, token in enumerate(tokens[:width])]
        texts.extend([b""] * (width - len(texts)))
        self.tokens: tuple[bytes, ...] = tuple(texts)
        self.stop_token_ids: tuple[int, ...] = tuple(sorted({*checked_ids(stop_token_ids, "stop_token_ids")}))
        if not self.stop_token_ids:
            raise VocabularyError("no stop token: a guided row could never end; pass stop_token_ids=[...]")
        for token_id in self.stop_token_ids:
            if not 0 <= token_id < width:
                raise VocabularyError(
                    f"stop token {token_id} is outside the {width} columns of the vocabulary; "
                    "pass the model's own stop_token_ids, or a larger vocab_size"
                )
        self.stop_token_set: frozenset[int] = frozenset(self.stop_token_ids)
        self.special_token_ids: frozenset[int] = frozenset(i for i, text in enumerate(self.tokens) if not text)
        # ids that are never part of a text, stop tokens among them
        self.not_text: frozenset[int] = self.special_token_ids | self.stop_token_set
        self.special_token_names: Mapping[str, int] = MappingProxyType(
            {name: token_id for name, token_id in (special_token_names or {}).items() if 0 <= token_id < width}
        )
        if all(not text or i in self.stop_token_set for i, text in enumerate(self.tokens)):
            raise VocabularyError("no token has any text, so no guide could ever be followed")
        bits: dict[int, int] = {}
        for token_id in self.stop_token_ids:
            bits[token_id >> 5] = bits.get(token_id >> 5, 0) | 1 << (token_id & 31)
        # (word, bits) of the stop tokens, and the real bits of a row's last word, as int32
        self.stop_words: tuple[tuple[int, np.int32], ...] = tuple((w, _as_int32(b)) for w, b in sorted(bits.items()))
        self.tail_word: np.int32 = _as_int32((1 << (width % 32)) - 1 if width % 32 else 0xFFFFFFFF)

    @classmethod
    def from_bytes(
        cls,
        tokens: list[bytes | None],
        *,
        stop_token_ids: Iterable[int],
        special_token_ids: Iterable[int] = (),
        vocab_size: int | None = None,
    ) -> "Vocabulary":
        """Build from the bytes of each id.

        Args:
            tokens: bytes by id; None or b"" for ids without text.
            stop_token_ids: ids that end a row, at least one.
            special_token_ids: ids whose bytes, if any, are not text.
            vocab_size: columns of the logits; None is `len(tokens)`. Wider is padded with ids without text, narrower
                is cut.

        Raises:
            VocabularyError: no stop token, a stop token out of range, an item that is not bytes, or no text at all.
        """
        for token_id, token in enumerate(tokens):
            if token is not None and not isinstance(token, bytes | bytearray):
                raise VocabularyError(f"token {token_id} must be bytes or None, got {type(token).__name__} {token!r}")
        return cls(tokens, stop_token_ids=stop_token_ids, special_token_ids=special_token_ids, vocab_size=vocab_size)

    @classmethod
    def from_tokenizer(
        cls, tokenizer: Any, *, vocab_size: int | None = None, stop_token_ids: Iterable[int] | int | None = None
    ) -> "Vocabulary":
        """Build from a tokenizer of any supported make.

        Args:
            tokenizer: a `transformers` tokenizer (fast or slow), a folder or `tokenizer.json` (path or text),
                `tokenizers.Tokenizer`, `tiktoken.Encoding`, `SentencePieceProcessor`, or mistral-common's `Tekkenizer`.
            vocab_size: columns of the model's logits; None is what the tokenizer has. Wider is padded with ids without
                text, narrower is cut.
            stop_token_ids: ids that end a row, beside the tokenizer's end-of-sequence token and, for a folder, those
                its `config.json` and `generation_config.json` name. All of them stop a row.

        Raises:
            VocabularyError: unknown make, no stop token, a stop token of the caller's outside `vocab_size`, or a table
                that does not reproduce the tokenizer's decoding.
        """
        from gd_plugin.grammars.tokenizers import read_tokenizer

        read = read_tokenizer(tokenizer)
        width = len(read.tokens) if vocab_size is None else checked_size(vocab_size)
        stops = {*checked_ids(stop_token_ids, "stop_token_ids")}
        # a model narrower than its tokenizer cannot emit the tokenizer's own stop token
        stops |= {token_id for token_id in read.stop_token_ids if 0 <= token_id < width}
        vocabulary = cls(
            read.tokens,
            stop_token_ids=stops,
            special_token_ids=read.special_token_ids,
            special_token_names=read.special_token_names,
            vocab_size=vocab_size,
        )
        vocabulary.encode = read.encode
        return vocabulary

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes of one id; b"" for special tokens, holes and padding.

        Raises:
            IndexError: the id is negative or not below `vocab_size`.
        """
        if not 0 <= token_id < self.vocab_size:
            raise IndexError(f"token {token_id} is outside the {self.vocab_size} columns of the vocabulary")
        return self.tokens[token_id]

    def decode(self, token_ids: Iterable[int]) -> bytes:
        """Return the bytes that `token_ids` spell in the middle of a document; ids without text add nothing."""
        return b"".join(self.token_bytes(int(token_id)) for token_id in token_ids)

    @cached_property
    def fingerprint(self) -> str:
        """Hash of everything that decides a mask; equal vocabularies have equal fingerprints."""
        head = (self.vocab_size, self.stop_token_ids, sorted(self.special_token_names.items()))
        digest = hashlib.sha256(repr(head).encode())
        for token in self.tokens:
            digest.update(len(token).to_bytes(4, "little"))
            digest.update(token)
        return digest.hexdigest()

    def __copy__(self) -> "Vocabulary":
        return self

    def __deepcopy__(self, memo: object) -> "Vocabulary":
        # immutable, and engines' tables are kept by its identity
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return _restore, (self.tokens, self.stop_token_ids, dict(self.special_token_names))

    def __repr__(self) -> str:
        return f"Vocabulary(vocab_size={self.vocab_size}, stop_token_ids={self.stop_token_ids})"


def text_of(vocabulary: Vocabulary, token_ids: Iterable[int]) -> str:
    """Return the text of tokens; half a character at the end is left out, other broken UTF-8 is replaced."""
    data = vocabulary.decode(i for i in token_ids if i < vocabulary.vocab_size)
    for cut in range(4):
        try:
            return data[: len(data) - cut].decode("utf-8")
        except UnicodeDecodeError as error:
            if error.reason != "unexpected end of data":
                break
    return data.decode("utf-8", errors="replace")


def _restore(tokens: tuple[bytes, ...], stop_token_ids: tuple[int, ...], names: dict[str, int]) -> Vocabulary:
    return Vocabulary(tokens, stop_token_ids=stop_token_ids, special_token_names=names)


# no model is this wide; a row and a table are allocated by this number
_MAX_VOCAB_SIZE: Final = 1 << 24


def checked_size(vocab_size: int) -> int:
    """Return a number of columns as int, or raise a VocabularyError."""
    if isinstance(vocab_size, bool) or not isinstance(vocab_size, int | np.integer):
        raise VocabularyError(f"vocab_size must be a number of columns, got {vocab_size!r}")
    if vocab_size > _MAX_VOCAB_SIZE:
        raise VocabularyError(f"vocab_size must be at most {_MAX_VOCAB_SIZE}, got {vocab_size}")
    return int(vocab_size)


def checked_ids(token_ids: Iterable[int] | int | None, name: str) -> list[int]:
    """Return ids of any integer type as int, in order; None is none.

    Raises:
        VocabularyError: something else than whole numbers; `name` is the argument they came in.
    """
    if token_ids is None:
        return []
    try:
        if isinstance(token_ids, str | bytes | bytearray | bool):
            raise TypeError("no ids")  # some of it would read as numbers
        listed = [token_ids] if isinstance(token_ids, int | np.integer) else list(token_ids)
        if any(isinstance(token_id, bool) for token_id in listed):
            raise TypeError("no id")
        return [index(token_id) for token_id in listed]
    except TypeError as error:
        raise VocabularyError(f"{name} must be token ids (whole numbers), got {reprlib.repr(token_ids)}") from error


def _as_int32(bits: int) -> np.int32:
    return np.uint32(bits).view(np.int32)
