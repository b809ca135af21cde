"""Does a table of token bytes decode as its tokenizer does?

In:  bytes by id, and the tokenizer's own encoding and decoding.    Out: nothing, or a VocabularyError showing a place.
Two passes: sample texts in many scripts, so that pieces of characters are seen in their order, and every id whose bytes
are text by themselves. Decoding is compared, never encoding: normalisers and dropped characters are its own affair.
"""

import re
from collections.abc import Callable, Sequence
from typing import Final

from gd_plugin.errors import VocabularyError

__all__ = ["check_table"]

_REPLACEMENT: Final = "\ufffd"
# ids decoded in one call
_CHUNK: Final = 64
_SAMPLES: Final = (
    "The quick brown fox, it's 12345.67 — “quoted” (done)!",
    '{"name": "José", "tags": [1, 2.5e-3, null, true]}\n\t{"a":\t"b\\u00e9\\n"}',
    "Ça où? Größe, ñandú, žluťoučký kůň, İstanbul",
    "Привет, мир! Українська їжак. Γειά σου Κόσμε",  # noqa: RUF001
    "שלום עולם. مرحبا بالعالم، كيف حالك؟",
    "नमस्ते दुनिया। বাংলা ভাষা। தமிழ் மொழி",
    "你好,世界。繁體中文。こんにちは、カタカナ。안녕하세요 세계",
    "สวัสดีชาวโลก ሰላም ልዑል გამარჯობა Բարեւ",
    "👩‍🚀 🇺🇳 😀🙏 𝔘𝔫𝔦𝔠𝔬𝔡𝔢 ½ ﬁ \u0301 \u200b \u00a0",  # noqa: RUF001
    "def f(x):\r\n    return x  # tabs\t\tand    spaces\n\n\n<a href='x'>&amp;</a>",
)


def check_table(
    tokens: Sequence[bytes | None],
    encode: Callable[[str], list[int]],
    decode: Callable[[list[int]], str],
    skip: "set[int] | frozenset[int]" = frozenset(),
) -> None:
    """Compare a table with its tokenizer's own decoding.

    Args:
        tokens: bytes by id, None for ids without text.
        encode: text -> ids, without special tokens around them.
        decode: ids -> text, nothing skipped and nothing cleaned up.
        skip: ids which the tokenizer decodes differently among others.

    Raises:
        VocabularyError: they differ; the message shows one place where they do.
    """
    for sample in _SAMPLES:
        ids = [i for i in encode(sample) if i < len(tokens) and tokens[i] is not None]
        _compare(tokens, ids, decode)
    whole = [i for i, token in enumerate(tokens) if token and i not in skip and _is_text(token)]
    for start in range(0, len(whole), _CHUNK):
        _compare(tokens, whole[start : start + _CHUNK], decode)


def _is_text(token: bytes) -> bool:
    if token.isascii():
        return True
    try:
        token.decode()
    except UnicodeDecodeError:
        return False
    return True


def _compare(tokens: Sequence[bytes | None], ids: list[int], decode: Callable[[list[int]], str]) -> None:
    if _agree(tokens, ids, decode(ids)):
        return
    # the shortest piece that shows it
    while len(ids) > 1:
        half = len(ids) // 2
        wrong = next((part for part in (ids[:half], ids[half:]) if not _agree(tokens, part, decode(part))), None)
        if wrong is None:
            break
        ids = wrong
    ours = b"".join(tokens[i] or b"" for i in ids)
    raise VocabularyError(
        f"the token table does not reproduce the tokenizer's decoding: ids {ids[:8]} are "
        f"{ours[:60]!r} by the table and {decode(ids)[:60]!r} by the tokenizer; "
        "pass the bytes with Vocabulary.from_bytes"
    )


def _agree(tokens: Sequence[bytes | None], ids: list[int], decoded: str) -> bool:
    ours = b"".join(tokens[i] or b"" for i in ids).decode("utf-8", "replace")
    # tokenizers of words drop the space in front of a document; the table speaks of its middle
    if decoded in (ours, ours.removeprefix(" ")):
        return True
    # decoders differ in how many replacement characters broken UTF-8 gives
    return _REPLACEMENT in ours and _squash(decoded) in (_squash(ours), _squash(ours.removeprefix(" ")))


def _squash(text: str) -> str:
    return re.sub(f"{_REPLACEMENT}+", _REPLACEMENT, text)
