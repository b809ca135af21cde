"""What the command reads: guides, texts, tokenizers and models, each from what a user typed.

In:  an argument of the command line.      Out: a Guide, a text, a tokenizer, a model; or a UserError that says what to do.
Kept here: nothing is read past a limit, whatever the file claims to be; the final newline of a file is no part of it.
"""

import contextlib
import importlib
import json
import os
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from gd_plugin.config import GuidedDecodingConfig
from gd_plugin.errors import GuideTooLargeError, InvalidGuideError
from gd_plugin.guides.guide import Guide, GuideType

__all__ = ["MAX_TEXT_BYTES", "NamedText", "UserError", "load_model", "load_tokenizer", "read_guide", "read_text"]

# a text is checked byte by byte: 200 KB take some six seconds
MAX_TEXT_BYTES: Final = 256 << 10
_GUIDE_KEYS: Final = frozenset(kind.value for kind in GuideType)
# what tells a schema that happens to have a key of one of those names
_SCHEMA_KEYS: Final = frozenset(
    {"$schema", "$ref", "$defs", "type", "properties", "anyOf", "oneOf", "allOf", "enum", "const"}
)
_GUIDE_SUFFIXES: Final = ".json, .regex, .ebnf, .gbnf or .lark"
_IMPORTABLE: Final = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")
# names of the small model that a package ships
_PACKAGED: Final = frozenset({"smollm2", "HuggingFaceTB/SmolLM2-135M-Instruct"})


class UserError(Exception):
    """Something that was typed or pointed at cannot be used; the message says what and what to do."""


@dataclass(frozen=True)
class NamedText:
    """A text to check and what to call it: a file's name, "standard input", or "text 1"."""

    name: str
    text: str


def read_guide(argument: str) -> Guide:
    """Return the guide in a file, or the type that `module:Model` names.

    Raises:
        UserError: no such file, or one that cannot be read as its suffix says.
        GuideError: what the file holds is no guide.
    """
    path = Path(argument)
    if not path.exists() and _IMPORTABLE.fullmatch(argument):
        return _imported_guide(argument)
    suffix = path.suffix.lower()
    limit = GuidedDecodingConfig().max_guide_bytes
    # a schema may be written with more spacing than is kept of it
    data = _read_file(path, 4 * limit, "guide")
    if data is None:
        raise GuideTooLargeError(
            f"{argument}: a guide may have max_guide_bytes={limit} bytes", limit="max_guide_bytes", hint="shorten it"
        )
    text = _without_final_newline(_decoded(data, argument).removeprefix("\ufeff"))
    if suffix == ".json":
        return _json_guide(text)
    if not text:
        raise InvalidGuideError(f"{argument}: the file is empty", hint="write a guide into it, such as a JSON Schema")
    if suffix == ".regex":
        return Guide.regex(text)
    if suffix in (".ebnf", ".gbnf"):
        return Guide.ebnf(text)
    if suffix == ".lark":
        return Guide.lark(text)
    raise UserError(f"{argument}: a guide's file name ends in {_GUIDE_SUFFIXES}; or write module:Model for a type")


def read_text(argument: str, number: int, *, keep_newline: bool = False, max_bytes: int = MAX_TEXT_BYTES) -> NamedText:
    """Return the text of an argument: "-" is standard input, the name of a file its content, anything else itself.

    Args:
        argument: what was typed.
        number: place among the texts, from 1.
        keep_newline: the final newline of a file or of standard input is part of the text.
        max_bytes: longest file or standard input.

    Raises:
        UserError: not UTF-8, too long, or a folder.
    """
    if argument == "-":
        data: bytes | None = sys.stdin.buffer.read(max_bytes + 1)
        name = "standard input"
    elif _is_path(argument):
        data = _read_file(Path(argument), max_bytes, "text")
        name = argument
    else:
        try:
            argument.encode()
        except UnicodeEncodeError as error:
            raise UserError(f"text {number} is not UTF-8: byte {error.start} cannot be read") from None
        return NamedText(f"text {number}", argument)
    if data is None or len(data) > max_bytes:
        raise UserError(f"{name}: longer than {max_bytes} bytes; check takes longer texts with --max-bytes")
    text = _decoded(data, name)
    return NamedText(name, text if keep_newline else _without_final_newline(text))


def load_tokenizer(name: str) -> Any:
    """Return what `Vocabulary.from_tokenizer` reads: a tokenizer of a folder or hub name, or the path of a tokenizer.json.

    Raises:
        UserError: there is none.
    """
    if name.endswith(".json"):
        if not Path(name).is_file():
            raise UserError(f"{name}: no such file")
        return name
    with _quiet_transformers():
        from transformers import AutoTokenizer

        try:
            return AutoTokenizer.from_pretrained(_folder(name, tokenizer_only=True))
        except (OSError, ValueError, ImportError, KeyError) as error:
            raise UserError(f"no tokenizer in {name!r}: {_first_line(error)}") from error


def load_model(name: str) -> tuple[Any, Any]:
    """Return the causal model and the tokenizer of a folder or hub name.

    Raises:
        UserError: there is none.
    """
    tokenizer = load_tokenizer(name)
    with _quiet_transformers():
        from transformers import AutoModelForCausalLM

        try:
            model = AutoModelForCausalLM.from_pretrained(_folder(name, tokenizer_only=False))
        except (OSError, ValueError, ImportError, KeyError) as error:
            raise UserError(f"no causal model in {name!r}: {_first_line(error)}") from error
    return model.eval(), tokenizer


def _folder(name: str, *, tokenizer_only: bool) -> str:
    if name not in _PACKAGED or Path(name).is_dir():
        return name
    from gd_plugin.testing.real_model import smollm2_folder

    return str(smollm2_folder(tokenizer_only=tokenizer_only))


@contextlib.contextmanager
def _quiet_transformers() -> Iterator[None]:
    """Keep transformers' bars and notes off standard error while something is loaded."""
    import transformers

    logging = transformers.utils.logging
    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()


def _json_guide(text: str) -> Guide:
    """A JSON file holds a schema, or the shape that `Guide.to_json` writes."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        # the reader of schemas says what is wrong, and where
        return Guide.json_schema(text)
    if isinstance(value, dict) and _GUIDE_KEYS & value.keys() and not _SCHEMA_KEYS & value.keys():
        return Guide.from_json(text)
    return Guide.json_schema(text)


def _imported_guide(argument: str) -> Guide:
    module_name, _, path = argument.partition(":")
    here = os.getcwd()
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        found: Any = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not (module_name + ".").startswith(error.name + "."):
            raise UserError(f"{module_name} cannot be imported: {_first_line(error)}") from error
        raise UserError(
            f"no file and no module {module_name!r} here: run the command from the module's folder"
        ) from error
    except (Exception, SystemExit) as error:
        raise UserError(f"{module_name} cannot be imported: {type(error).__name__}: {_first_line(error)}") from error
    for name in path.split("."):
        try:
            found = getattr(found, name)
        except AttributeError as error:
            raise UserError(f"{module_name} has no {path!r}") from error
    return found if isinstance(found, Guide) else Guide.from_type(found)


def _is_path(argument: str) -> bool:
    try:
        return argument != "" and Path(argument).exists()
    except (OSError, ValueError):  # longer than a name can be, or with a null byte
        return False


def _read_file(path: Path, limit: int, what: str) -> bytes | None:
    """Return what a file holds, or None past the limit: a file's size is not asked, which a pipe has none of."""
    try:
        if path.is_dir():
            raise UserError(f"{path} is a folder; name the file with the {what}")
        with path.open("rb") as file:
            data = file.read(limit + 1)
    except FileNotFoundError:
        advice = f": a guide's file name ends in {_GUIDE_SUFFIXES}, or write module:Model" if what == "guide" else ""
        raise UserError(f"{path}: no such file{advice}") from None
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: {getattr(error, 'strerror', None) or error}") from error
    return data if len(data) <= limit else None


def _decoded(data: bytes, name: str) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise UserError(f"{name}: not UTF-8: byte {error.start} is 0x{data[error.start]:02x}") from None


def _without_final_newline(text: str) -> str:
    return text.removesuffix("\n").removesuffix("\r") if text.endswith("\n") else text


def _first_line(error: BaseException) -> str:
    lines = str(error).splitlines()
    return lines[0] if lines else type(error).__name__
