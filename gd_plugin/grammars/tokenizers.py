"""Tokenizers of every make -> bytes by id.

In:  a tokenizer object, or a path.      Out: TokenizerTable: bytes, special ids, stop ids.
"""

from dataclasses import dataclass, field
from typing import Any

from gd_plugin.errors import VocabularyError

__all__ = ["TokenizerTable", "read_tokenizer"]


@dataclass
class TokenizerTable:
    """What a tokenizer says about its ids; `tokens[i]` is None for ids without text."""

    tokens: list[bytes | None]
    special_token_ids: set[int]
    stop_token_ids: list[int]
    special_token_names: dict[str, int] = field(default_factory=dict)


def read_tokenizer(tokenizer: Any) -> TokenizerTable:
    """Read a `transformers` tokenizer with a byte-level vocabulary."""
    if not hasattr(tokenizer, "get_vocab"):
        raise VocabularyError(f"cannot read a tokenizer of type {type(tokenizer).__name__}")
    alphabet = _byte_alphabet()
    vocab = tokenizer.get_vocab()
    added = tokenizer.added_tokens_decoder
    tokens: list[bytes | None] = [None] * (max(vocab.values()) + 1)
    for text, token_id in vocab.items():
        if token_id in added:
            tokens[token_id] = None if added[token_id].special else added[token_id].content.encode()
        else:
            tokens[token_id] = bytes(alphabet[character] for character in text)
    special = {token_id for token_id, token in added.items() if token.special}
    stops = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    names = {token.content: token_id for token_id, token in added.items() if token.special}
    return TokenizerTable(tokens, special, stops, names)


def _byte_alphabet() -> dict[str, int]:
    """The printable stand-ins that byte-level BPE vocabularies use for bytes (GPT-2's table)."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    table = {chr(byte): byte for byte in printable}
    others = [byte for byte in range(256) if byte not in printable]
    table.update({chr(256 + offset): byte for offset, byte in enumerate(others)})
    return table
