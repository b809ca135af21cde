"""Tokenizers of every make -> bytes by id.

In:  a tokenizer object, or a file or folder of one.      Out: TokenizerTable: bytes, special ids, stop ids.

The tokenizer's own decoder is the truth, and roundtrip.py holds every table against it. Class names say nothing:
byte-level vocabularies are saved under SentencePiece classes and the other way round.
"""

import json
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from operator import index
from pathlib import Path
from typing import Any, Final

from gd_plugin.errors import VocabularyError
from gd_plugin.grammars.roundtrip import check_table

__all__ = ["TokenizerTable", "read_tokenizer"]

# ten times the largest vocabulary there is; a table of a hostile tokenizer's largest id would fill the memory
_MAX_TOKENS: Final = 1 << 22
_BYTE_PIECE: Final = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_SPACE: Final = "\u2581"


@dataclass
class TokenizerTable:
    """What a tokenizer says about its ids; `tokens[i]` is None for ids without text. `encode` adds no special tokens."""

    tokens: list[bytes | None]
    special_token_ids: set[int]
    stop_token_ids: list[int]
    special_token_names: dict[str, int] = field(default_factory=dict)
    encode: Callable[[str], list[int]] | None = None


def read_tokenizer(tokenizer: Any) -> TokenizerTable:
    """Return the table of a tokenizer of any make that `Vocabulary.from_tokenizer` names.

    Raises:
        VocabularyError: unknown make, no such file, or a table that does not decode as the tokenizer does.
    """
    if isinstance(tokenizer, str | Path):
        return _read_path(tokenizer)
    for matches, read in _MAKES:
        if matches(tokenizer):
            return read(tokenizer)
    kind = f"{type(tokenizer).__module__}.{type(tokenizer).__qualname__}"
    raise VocabularyError(
        f"cannot read a tokenizer of type {kind}; pass a transformers tokenizer, a tokenizers.Tokenizer, a "
        "tiktoken.Encoding, a SentencePieceProcessor, a Tekkenizer, the path of one, or use Vocabulary.from_bytes"
    )


def _is_from(tokenizer: Any, module: str, name: str) -> bool:
    """Tell whether a base class of that name comes from `module`, without importing it."""
    return any(
        base.__name__ == name and base.__module__.partition(".")[0] == module for base in type(tokenizer).__mro__
    )


# ---- files


def _read_path(source: str | Path) -> TokenizerTable:
    if isinstance(source, str) and source.lstrip().startswith("{"):
        return _read_json_text(source, "the tokenizer.json text")
    path = Path(source)
    try:
        is_folder, is_file = path.is_dir(), path.is_file()
    except (OSError, ValueError) as error:
        raise VocabularyError(f"{str(source)[:80]!r} is not a path: {error}") from error
    if is_folder:
        return _read_folder(path)
    if not is_file:
        raise VocabularyError(
            f"{str(source)[:200]!r} is neither a folder nor a file; models are not downloaded here: "
            "pass the tokenizer itself, or its folder"
        )
    if path.suffix == ".tiktoken":
        return _read_ranks(path)
    if path.suffix == ".json":
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise VocabularyError(f"{path} cannot be read: {error}") from error
        table = _read_json_text(text, str(path), path)
        table.stop_token_ids = _union(table.stop_token_ids, _configured_stops(path.parent, table.special_token_names))
        return table
    try:
        import sentencepiece

        return _read_sentencepiece(sentencepiece.SentencePieceProcessor(model_file=str(path)))
    except ImportError as error:
        raise VocabularyError(f"reading {path} needs sentencepiece: pip install sentencepiece") from error
    except (OSError, RuntimeError) as error:
        raise VocabularyError(f"{path} is not a SentencePiece model: {error}") from error


def _read_folder(folder: Path) -> TokenizerTable:
    if (folder / "tokenizer_config.json").is_file() or (folder / "config.json").is_file():
        from transformers import AutoTokenizer

        try:
            tokenizer = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
        except Exception as error:
            raise VocabularyError(f"{folder}: transformers cannot load this tokenizer: {error}") from error
        table = read_tokenizer(tokenizer)
        table.stop_token_ids = _union(table.stop_token_ids, _configured_stops(folder, table.special_token_names))
        return table
    for name in ("tokenizer.json", "tekken.json", "tokenizer.model"):
        if (folder / name).is_file():
            return _read_path(folder / name)
    raise VocabularyError(f"{folder} holds no tokenizer: tokenizer.json, tekken.json or tokenizer.model is needed")


def _read_json_text(text: str, name: str, path: Path | None = None) -> TokenizerTable:
    try:
        record = json.loads(text) if "token_bytes" in text[:100_000] else {}
        if path is not None and isinstance(record, dict) and "vocab" in record and "config" in record:
            from mistral_common.tokens.tokenizers.tekken import Tekkenizer

            return _read_tekken(Tekkenizer.from_file(str(path)))
        from tokenizers import Tokenizer

        tokenizer = Tokenizer.from_str(text)
    except ImportError as error:
        raise VocabularyError(f"reading {name} needs {error.name}: pip install mistral-common") from error
    except Exception as error:
        raise VocabularyError(f"{name} is not a tokenizer: {error}") from error
    return _read_tokenizers(tokenizer)


def _read_ranks(path: Path) -> TokenizerTable:
    """Read tiktoken's text format: a line has base64 bytes and a rank."""
    import base64

    ranks: dict[int, bytes] = {}
    try:
        for line in path.read_bytes().splitlines():
            if line.strip():
                encoded, rank = line.split()
                ranks[int(rank)] = base64.b64decode(encoded, validate=True)
    except ValueError as error:
        raise VocabularyError(f"{path} is not a tiktoken rank file: {error}") from error
    return TokenizerTable(_as_list(ranks, path.name), set(), [])


def _configured_stops(folder: Path, names: dict[str, int]) -> list[int]:
    """End-of-sequence ids that a model's files name beside its tokenizer."""
    stops: list[int] = []
    for file, key in (("config.json", "eos_token_id"), ("generation_config.json", "eos_token_id"),
                      ("tokenizer_config.json", "eos_token")):  # fmt: skip
        try:
            value = json.loads((folder / file).read_text(encoding="utf-8")).get(key)
        except (OSError, ValueError, AttributeError, RecursionError):
            continue
        value = value.get("content") if isinstance(value, dict) else value
        for item in value if isinstance(value, list) else [value]:
            token_id = names.get(item) if isinstance(item, str) else item
            if isinstance(token_id, int) and not isinstance(token_id, bool):
                stops.append(token_id)
    return stops


# ---- transformers and tokenizers


def _read_transformers(tokenizer: Any) -> TokenizerTable:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    special = {index(i) for i in getattr(tokenizer, "all_special_ids", ()) if i is not None}
    stops = [] if tokenizer.eos_token_id is None else [index(tokenizer.eos_token_id)]
    if backend is not None:
        table = _read_tokenizers(backend, special)
    else:
        table = _read_slow(tokenizer, special)
    table.stop_token_ids = stops
    for token_id in special:
        table.special_token_names.setdefault(str(tokenizer.convert_ids_to_tokens(token_id)), token_id)
    return table


def _read_tokenizers(tokenizer: Any, special: Iterable[int] = ()) -> TokenizerTable:
    """Read a `tokenizers.Tokenizer`; `special` adds to the ids it calls special itself."""
    added = tokenizer.get_added_tokens_decoder()
    texts = {token_id: text for text, token_id in tokenizer.get_vocab(with_added_tokens=True).items()}
    special_ids = {token_id for token_id, token in added.items() if token.special} | set(special)
    to_bytes = _decoder_of(tokenizer.decoder)
    pieces = {token_id: to_bytes(text) for token_id, text in texts.items() if token_id not in special_ids}
    names = {texts[token_id]: token_id for token_id in special_ids if token_id in texts}
    table = TokenizerTable(_as_list({**dict.fromkeys(special_ids), **pieces}, "tokenizer"), special_ids, [], names)
    table.encode = lambda text: list(tokenizer.encode(text, add_special_tokens=False).ids)
    check_table(
        table.tokens,
        table.encode,
        lambda ids: str(tokenizer.decode(ids, skip_special_tokens=False)),
    )
    return table


def _decoder_of(decoder: Any) -> Callable[[str], bytes]:
    """Return what turns one token's text into the bytes it adds in the middle of a document."""
    if decoder is None:
        # the library then joins tokens with spaces
        return lambda text: b" " + text.encode()
    state = json.loads(decoder.__getstate__())
    kinds = {part.get("type") for part in state.get("decoders", [state])}
    if "ByteLevel" in kinds:
        return _byte_level_bytes()

    def middle(text: str) -> bytes:
        # behind another token, so that nothing is stripped as the document's first space
        return str(decoder.decode(["a", text])[1:]).encode()

    if "ByteFallback" not in kinds:
        return middle

    def middle_or_byte(text: str) -> bytes:
        match = _BYTE_PIECE.fullmatch(text)
        return bytes([int(match.group(1), 16)]) if match else middle(text)

    return middle_or_byte


def _byte_level_bytes() -> Callable[[str], bytes]:
    """Undo GPT-2's alphabet of printable stand-ins for bytes; a token with any other character is itself."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    # bytes that stand for nothing become characters which latin-1 refuses
    table = dict.fromkeys(others, "\ufffd") | {256 + offset: chr(byte) for offset, byte in enumerate(others)}

    def to_bytes(text: str) -> bytes:
        try:
            return text.translate(table).encode("latin-1")
        except UnicodeEncodeError:
            return text.encode("utf-8", "surrogatepass")

    return to_bytes


def _read_slow(tokenizer: Any, special: set[int]) -> TokenizerTable:
    """Read a `transformers` tokenizer written in Python."""
    added = tokenizer.added_tokens_decoder
    special_ids = special | {token_id for token_id, token in added.items() if token.special}
    texts = {token_id: text for text, token_id in tokenizer.get_vocab().items() if token_id not in special_ids}
    if hasattr(tokenizer, "byte_decoder"):
        to_bytes = _byte_level_bytes()
    elif hasattr(tokenizer, "sp_model"):
        to_bytes = _piece_bytes
    elif hasattr(tokenizer, "_utf_vocab_size"):  # ByT5 and its kin: a character's number is the byte
        to_bytes = lambda text: text.encode("latin-1") if len(text) == 1 and ord(text) < 256 else text.encode()  # noqa: E731
    else:
        anchor = next((t for i, t in texts.items() if i not in added and t.isascii() and t.isalpha()), "")
        lead = len(tokenizer.convert_tokens_to_string([anchor]))
        to_bytes = lambda text: tokenizer.convert_tokens_to_string([anchor, text])[lead:].encode()  # noqa: E731
    pieces: dict[int, bytes | None] = dict.fromkeys(special_ids)
    for token_id, text in texts.items():
        pieces[token_id] = added[token_id].content.encode() if token_id in added else to_bytes(text)
    names = {str(tokenizer.convert_ids_to_tokens(token_id)): token_id for token_id in special_ids}
    table = TokenizerTable(_as_list(pieces, type(tokenizer).__name__), special_ids, [], names)
    table.encode = lambda text: list(tokenizer.encode(text, add_special_tokens=False))
    # decoding an added token puts spaces around it in some tokenizers: they are left out of the comparison
    check_table(
        table.tokens,
        lambda text: [i for i in tokenizer.encode(text, add_special_tokens=False) if i not in added],
        lambda ids: str(tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)),
        skip=set(added),
    )
    return table


# ---- the other makes


def _piece_bytes(piece: str) -> bytes:
    match = _BYTE_PIECE.fullmatch(piece)
    return bytes([int(match.group(1), 16)]) if match else piece.replace(_SPACE, " ").encode()


def _read_sentencepiece(processor: Any) -> TokenizerTable:
    size = int(processor.vocab_size())
    tokens: list[bytes | None] = []
    special: set[int] = set()
    names: dict[str, int] = {}
    for token_id in range(_checked_size(size, "SentencePiece model")):
        piece = str(processor.id_to_piece(token_id))
        if processor.is_control(token_id) or processor.is_unknown(token_id) or processor.is_unused(token_id):
            special.add(token_id)
            names[piece] = token_id
            tokens.append(None)
        elif processor.is_byte(token_id):
            tokens.append(_piece_bytes(piece))
        else:
            tokens.append(piece.replace(_SPACE, " ").encode())
    stops = [int(processor.eos_id())] if processor.eos_id() >= 0 else []
    table = TokenizerTable(tokens, special, stops, names)
    table.encode = lambda text: list(processor.encode(text))
    check_table(table.tokens, table.encode, lambda ids: str(processor.decode(ids)))
    return table


def _read_tiktoken(encoding: Any) -> TokenizerTable:
    names = {str(name): encoding.encode_single_token(name) for name in encoding.special_tokens_set}
    special = set(names.values())
    pieces: dict[int, bytes | None] = dict.fromkeys(special)
    for token_id in range(_checked_size(encoding.n_vocab, "tiktoken encoding")):
        if token_id not in special:
            try:
                pieces[token_id] = encoding.decode_single_token_bytes(token_id)
            except KeyError:  # a hole between ranks and special tokens
                continue
    try:
        stops = [int(encoding.eot_token)]
    except KeyError:
        stops = []
    table = TokenizerTable(_as_list(pieces, "tiktoken encoding"), special, stops, names)
    table.encode = lambda text: list(encoding.encode_ordinary(text))
    check_table(table.tokens, table.encode, lambda ids: str(encoding.decode(ids)))
    return table


def _read_tekken(tokenizer: Any) -> TokenizerTable:
    size = _checked_size(tokenizer.n_words, "tekken tokenizer")
    num_special = int(tokenizer.num_special_tokens)
    tokens = [None if i < num_special else bytes(tokenizer.id_to_byte_piece(i)) for i in range(size)]
    names = {str(tokenizer.id_to_piece(token_id)): token_id for token_id in range(num_special)}
    table = TokenizerTable(tokens, set(range(num_special)), [int(tokenizer.eos_id)], names)
    table.encode = lambda text: list(tokenizer.encode(text, bos=False, eos=False))
    check_table(
        table.tokens,
        table.encode,
        lambda ids: str(tokenizer.decode(ids)),
    )
    return table


def _read_mistral_common(tokenizer: Any) -> TokenizerTable:
    """Open mistral-common's wrappers, and the one transformers puts around them, down to the model."""
    inner = tokenizer
    for name in ("tokenizer", "instruct_tokenizer", "tokenizer"):
        inner = getattr(inner, name, inner)
    if _is_from(inner, "mistral_common", "Tekkenizer"):
        return _read_tekken(inner)
    if hasattr(inner, "_model"):
        return _read_sentencepiece(inner._model)
    raise VocabularyError(f"cannot read the mistral-common tokenizer {type(inner).__name__}; pass its Tekkenizer")


_MAKES: Final[tuple[tuple[Callable[[Any], bool], Callable[[Any], TokenizerTable]], ...]] = (
    (lambda t: _is_from(t, "mistral_common", "Tekkenizer"), _read_tekken),
    (lambda t: any(base.__module__.startswith("mistral_common.") for base in type(t).__mro__), _read_mistral_common),
    (lambda t: _is_from(t, "transformers", "MistralCommonBackend"), _read_mistral_common),
    (lambda t: _is_from(t, "vllm", "MistralTokenizer"), _read_mistral_common),
    (lambda t: _is_from(t, "tokenizers", "Tokenizer"), _read_tokenizers),
    (lambda t: _is_from(t, "tiktoken", "Encoding"), _read_tiktoken),
    (lambda t: _is_from(t, "sentencepiece", "SentencePieceProcessor"), _read_sentencepiece),
    (lambda t: _is_from(t, "transformers", "PreTrainedTokenizerBase"), _read_transformers),
)


# ---- checks


def _as_list(pieces: "dict[int, bytes | None] | dict[int, bytes]", name: str) -> list[bytes | None]:
    """Return the table by id, None where there is a hole."""
    if pieces and min(pieces) < 0:
        raise VocabularyError(f"{name} has the negative token id {min(pieces)}")
    tokens: list[bytes | None] = [None] * _checked_size(max(pieces, default=-1) + 1, name)
    for token_id, piece in pieces.items():
        tokens[token_id] = piece
    return tokens


def _checked_size(size: int, name: str) -> int:
    if size > _MAX_TOKENS:
        raise VocabularyError(f"{name} has the token id {size - 1}; more than {_MAX_TOKENS} tokens are not supported")
    return size


def _union(first: Iterable[int], second: Iterable[int]) -> list[int]:
    return sorted({*first, *second})
