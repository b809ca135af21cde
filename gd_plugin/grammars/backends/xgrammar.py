"""xgrammar behind the contract of grammars/matcher.py.

In:  a Guide and a Vocabulary.      Out: a CompiledGrammar whose matchers behave as the contract says.
Kept here: its exceptions never leave raw, and it is never called so that it prints. It sees tokens as raw bytes with
stop and special tokens blanked, because it treats a named special token as text.
Sources: xgrammar 0.2.9, its Python package and its EBNF and JSON Schema converters, by experiment.
"""

import functools
import inspect
import json
import os
import re
import weakref
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
import xgrammar

from gd_plugin.config import GuidedDecodingConfig
from gd_plugin.errors import (
    BackendNotInstalledError,
    GuideError,
    InvalidGuideError,
    UnsatisfiableGuideError,
    UnsupportedGuideError,
    VocabularyError,
)
from gd_plugin.grammars.backends.registry import (
    ALLOW_A_TEXT,
    USE_ANOTHER,
    Backend,
    CompiledGrammar,
    embedded_problems,
)
from gd_plugin.grammars.matcher import EngineMatcher, engine_errors
from gd_plugin.grammars.vocabulary import Vocabulary
from gd_plugin.guides.grammar import to_xgrammar_ebnf
from gd_plugin.guides.guide import Guide, GuideType
from gd_plugin.guides.language import TEXT_KINDS, is_regular, language_of
from gd_plugin.guides.limits import compile_weight, num_written_positions
from gd_plugin.guides.problem import Problem
from gd_plugin.guides.schema import normal_form, schema_problems
from gd_plugin.guides.structural_tag import has_inner_free_text, to_engine_format

__all__ = ["XGrammarBackend", "XGrammarMatcher", "create_backend"]

_NAME: Final = "xgrammar"
_INSTALL: Final = "xgrammar>=0.2.8"
_TAKES: Final = frozenset({GuideType.JSON, GuideType.JSON_SCHEMA, GuideType.STRUCTURAL_TAG}) | TEXT_KINDS
# more threads than this only contend for the compiler's lock
_MAX_COMPILE_THREADS: Final = 8
# the option of xgrammar's compiler that leaves masks to be built when they are first needed
_LAZY: Final = "enable_dynamic_compilation"
# benchmarks/guide_costs.py, 152k tokens: 60 places of "\\w" weigh 44,000 and take 8 times as long eager as lazy
_LAZY_WEIGHT: Final = 5_000
# characters of a regular guide that are no choice, repeats written out: eager, 60 of [a-z ] take seconds, 500 optional ones
# over 15 s
_LAZY_POSITIONS: Final = 50
_WORKER_WEIGHT: Final = 5_000
_WORKER_POSITIONS: Final = 500

# building a TokenizerInfo sorts the whole vocabulary: once a vocabulary, whatever the configuration
_tokenizer_infos: "weakref.WeakKeyDictionary[Vocabulary, Any]" = weakref.WeakKeyDictionary()


def create_backend(vocabulary: Vocabulary, config: GuidedDecodingConfig) -> Backend:
    """Return the xgrammar backend for `vocabulary` and `config`.

    Raises:
        BackendNotInstalledError: the installed version lacks what this adapter needs.
    """
    needed = {"any_whitespace", "separators", "strict_mode", "max_whitespace_cnt"}
    missing = needed - set(inspect.signature(xgrammar.GrammarCompiler.compile_json_schema).parameters)
    missing |= {name for name in ("fork", "is_completed", "rollback") if not hasattr(xgrammar.GrammarMatcher, name)}
    if missing:
        raise BackendNotInstalledError(
            f"the installed xgrammar is too old (it lacks {', '.join(sorted(missing))}): pip install '{_INSTALL}'",
            name=_NAME,
        )
    return XGrammarBackend(vocabulary, config)


class XGrammarMatcher(EngineMatcher):
    """One request's xgrammar matcher."""

    engine = _NAME
    # two cores, 49k tokens: the engine's pool, built anew for each call, is 0.7 to 1.0 times as fast as a loop at 32 to
    # 64 rows and 1.7 times at 256
    batch_break_even = 256

    def __init__(self, vocabulary: Vocabulary, engine: Any) -> None:
        super().__init__(vocabulary)
        self._engine = engine

    def _engine_accept(self, token_id: int) -> bool:
        return bool(self._engine.accept_token(token_id))

    def _engine_rollback(self, num_tokens: int) -> None:
        self._engine.rollback(num_tokens)

    def _engine_fill(self, rows: npt.NDArray[np.int32], index: int, address: int) -> None:
        # a one-dimensional row: with a matrix the engine ignores strides and writes into other rows
        self._engine.fill_next_token_bitmask(rows[index, : self._num_words], 0)

    @classmethod
    def _engine_fill_many(
        cls, matchers: "Sequence[XGrammarMatcher]", bitmask: torch.Tensor, indices: Sequence[int], num_threads: int
    ) -> dict[int, Exception]:
        pool = xgrammar.BatchGrammarMatcher(max_threads=num_threads)
        pool.batch_fill_next_token_bitmask([matcher._engine for matcher in matchers], bitmask, list(indices))
        return {}

    def _engine_accepting(self) -> bool:
        # not the stop bit of the mask, which can be set before the text is complete (regex "<.+?>" after "<>")
        return bool(self._engine.is_completed())

    def _engine_fork(self) -> "XGrammarMatcher":
        return XGrammarMatcher(self._vocabulary, self._engine.fork())

    def _engine_reset(self) -> None:
        self._engine.reset()

    @staticmethod
    def _engine_message(error: BaseException) -> str:
        return _engine_message(error)

    def _engine_forced_text(self) -> bytes:
        try:
            return str(self._engine.find_jump_forward_string()).encode()
        except UnicodeDecodeError as error:
            # xgrammar 0.2.8 inside a character: the bytes are right, only not a text
            return bytes(error.object)


class XGrammarCompiledGrammar(CompiledGrammar):
    """A guide compiled by xgrammar."""

    backend = _NAME

    def __init__(self, guide: Guide, vocabulary: Vocabulary, compiled: Any) -> None:
        self.guide = guide
        self.nbytes = int(compiled.memory_size_bytes)
        self._vocabulary = vocabulary
        self._compiled = compiled

    def create_matcher(self) -> XGrammarMatcher:
        """See `CompiledGrammar.create_matcher`."""
        try:
            engine = xgrammar.GrammarMatcher(self._compiled)
        except engine_errors() as error:
            raise XGrammarMatcher._engine_error(error) from error
        return XGrammarMatcher(self._vocabulary, engine)


class XGrammarBackend(Backend):
    """xgrammar for one vocabulary and one configuration. Safe to use from several threads."""

    name = _NAME

    def __init__(self, vocabulary: Vocabulary, config: GuidedDecodingConfig) -> None:
        self._vocabulary = vocabulary
        self._config = config
        # compiled grammars are cached above, by bytes; the engine's own cache has no hard limit
        options: dict[str, Any] = {
            "max_threads": min(_MAX_COMPILE_THREADS, os.cpu_count() or 1),
            "cache_enabled": False,
        }
        self._compiler = xgrammar.GrammarCompiler(_tokenizer_info(vocabulary), **options)
        self._lazy_compiler = self._compiler
        if _LAZY in inspect.signature(xgrammar.GrammarCompiler.__init__).parameters:
            self._lazy_compiler = xgrammar.GrammarCompiler(_tokenizer_info(vocabulary), **options, **{_LAZY: True})

    def problems(self, guide: Guide) -> list[Problem]:
        """See `Backend.problems`."""
        if guide.guide_type not in _TAKES:
            kind = guide.guide_type.value
            return [Problem("#", kind, _NAME, f"{kind} guides cannot be enforced by xgrammar; use backend='auto'")]
        if guide.reasoning is not None:
            return [Problem("#", "reasoning", _NAME, "free text before a guide is not part of an xgrammar grammar")]
        if guide.guide_type is GuideType.STRUCTURAL_TAG:
            found = embedded_problems(self, guide)
            if not found and has_inner_free_text(json.loads(guide.guide)["format"]):
                # measured on 0.2.9: it would end such text at the first end of the tag
                message = "free text deeper inside a tag would end with the tag's first end"
                found.append(Problem("#/format", "any_text", _NAME, message))
            return found
        if guide.guide_type is GuideType.JSON_SCHEMA:
            return schema_problems(guide.guide, self._config, _NAME)
        return []

    def is_large(self, guide: Guide) -> bool:
        """See `Backend.is_large`."""
        limit = _WORKER_POSITIONS if self._lazy_compiler is not self._compiler else _LAZY_POSITIONS
        return compile_weight(guide) > _WORKER_WEIGHT or _num_loose_positions(guide) > limit

    def compile(self, guide: Guide) -> CompiledGrammar:
        """See `Backend.compile`."""
        problems = self.problems(guide)
        # without `strict` the caller lists them as not enforced
        if problems and (self._config.strict or guide.guide_type is not GuideType.JSON_SCHEMA):
            first = problems[0]
            raise UnsupportedGuideError(
                f"{first.pointer}: {first.message}",
                pointer=first.pointer,
                keyword=first.keyword,
                hint=USE_ANOTHER,
                reasons={_NAME: first.message},
            )
        if guide.guide_type is GuideType.JSON_SCHEMA:
            # its errors name the place; the engine's do not
            normal_form(guide.guide, self._config)
        return XGrammarCompiledGrammar(guide, self._vocabulary, self._compile(guide))

    def load(self, guide: Guide, data: bytes) -> CompiledGrammar:
        """See `Backend.load`. Not the engine's serialisation, which takes far longer than compiling again."""
        return XGrammarCompiledGrammar(guide, self._vocabulary, self._compile(guide))

    def _compile(self, guide: Guide) -> Any:
        # compiled lazily, a mask costs up to 36 ms where it is first needed; else that many for each place in the guide
        lazy = compile_weight(guide) > _LAZY_WEIGHT or _num_loose_positions(guide) > _LAZY_POSITIONS
        compiler = self._lazy_compiler if lazy else self._compiler
        try:
            # the engine takes the end of its root rule for the end of the text: where the root refers to itself, tokens
            # that close two levels at once would be missing from the mask. Nothing refers to the root of a union.
            return compiler.compile_grammar(xgrammar.Grammar.union(self._grammar(guide)))
        except GuideError:
            raise
        except engine_errors() as error:
            raise _guide_error(guide, error) from error

    def _grammar(self, guide: Guide) -> Any:
        if guide.guide_type is GuideType.JSON:
            # the engine's built-in JSON grammar refuses scalars at the root
            return self._schema_grammar("{}" if guide.guide == "any" else '{"type":"object"}')
        if guide.guide_type is GuideType.JSON_SCHEMA:
            return self._schema_grammar((guide if self._config.strict else self._enforceable(guide)).guide)
        if guide.guide_type is GuideType.STRUCTURAL_TAG:
            spec = json.loads(guide.guide)
            spec["format"] = to_engine_format(
                spec["format"], lambda schema: str(self._schema_grammar(json.dumps(schema)))
            )
            return xgrammar.Grammar.from_structural_tag(spec)
        return xgrammar.Grammar.from_ebnf(to_xgrammar_ebnf(language_of(guide), alone=True))

    def _enforceable(self, guide: Guide) -> Guide:
        """Return the part of a schema that the engine enforces."""
        while (rest := _without(guide, self.problems(guide))) != guide:
            # a oneOf goes on as an anyOf, in which there may be more
            guide = rest
        return rest

    def _schema_grammar(self, schema: str) -> Any:
        compact = self._config.whitespace == "compact"
        bounded = self._config.whitespace == "bounded"
        grammar = xgrammar.Grammar.from_json_schema(
            schema,
            any_whitespace=not compact,
            separators=(",", ":") if compact else None,
            max_whitespace_cnt=self._config.max_whitespace if bounded else None,
            strict_mode=not self._config.additional_properties,
        )
        if compact and _spaced_free_values():
            return xgrammar.Grammar.from_ebnf(_SPACED_SEPARATOR.sub(r'\1","', str(grammar)))
        return grammar


def _num_loose_positions(guide: Guide) -> int:
    """Return the characters of a regular guide, but for the fixed ones of a choice."""
    return num_written_positions(guide) if guide.guide_type is not GuideType.CHOICE and is_regular(guide) else 0


# rules of the engine's own for values that a schema leaves free
_SPACED_SEPARATOR: Final = re.compile(r'(?m)^(basic_(?:array_items|object_properties)\w* ::= \(\()", "')


@functools.cache
def _spaced_free_values() -> bool:
    """Whether the installed engine puts its own ", " into free values, whatever separators it was given (0.2.8 does)."""
    grammar = xgrammar.Grammar.from_json_schema("{}", any_whitespace=False, separators=(",", ":"))
    return _SPACED_SEPARATOR.search(str(grammar)) is not None


def _without(guide: Guide, problems: list[Problem]) -> Guide:
    """Return a schema without the keywords that `problems` name: the engine takes them for others, or prints."""
    document: dict[str, Any] = json.loads(guide.guide)
    for problem in problems:
        if problem.keyword == "property_order":
            # a setting: the keys stay, in declared order
            continue
        *path, keyword = (part.replace("~1", "/").replace("~0", "~") for part in problem.pointer.split("/")[1:] or [""])
        holder: Any = document
        for part in path:
            holder = holder[int(part)] if isinstance(holder, list) else holder.get(part, {})
        # a type is named where something beside it is missing
        if isinstance(holder, dict) and keyword in holder and keyword != "type":
            dropped = holder.pop(keyword)
            if keyword == "oneOf":
                holder.setdefault("anyOf", dropped)
    return Guide.json_schema(document)


def _tokenizer_info(vocabulary: Vocabulary) -> Any:
    """Return the engine's view of the vocabulary. Two threads may both build it; either result is good."""
    info = _tokenizer_infos.get(vocabulary)
    if info is None:
        stops = vocabulary.stop_token_set
        tokens = [b"" if token_id in stops else token for token_id, token in enumerate(vocabulary.tokens)]
        try:
            info = xgrammar.TokenizerInfo(
                tokens,
                xgrammar.VocabType.RAW,
                vocab_size=vocabulary.vocab_size,
                stop_token_ids=list(vocabulary.stop_token_ids),
            )
        except engine_errors() as error:
            raise VocabularyError(f"xgrammar cannot read this vocabulary: {_engine_message(error)}") from error
        _tokenizer_infos[vocabulary] = info
    return info


# engine's words -> what they mean; anything else is an invalid guide
_UNSATISFIABLE: Final = re.compile(
    r"cannot accept any value|Invalid range|empty range|must not be empty|is greater than max|unsatisfiable", re.I
)
_UNSUPPORTED: Final = re.compile(r"not supported|unsupported|not implemented|int64|out of range|look-?ahead", re.I)
_PLACE: Final = re.compile(r"at line (\d+), column (\d+)")


def _engine_message(error: BaseException) -> str:
    """The engine's own sentence, without the time, file and line its C++ side puts in front."""
    text = str(error).strip() or type(error).__name__
    text = text.split("Stack trace:")[0].split("Traceback (most recent call last)")[0].strip()
    return re.sub(r"^\[[\d:]+\] \S+:\d+: ", "", text).strip()


def _guide_error(guide: Guide, error: BaseException) -> GuideError:
    """Translate whatever the engine raised while it compiled `guide`."""
    message = _engine_message(error)
    match = _PLACE.search(message)
    pointer = f"line {match.group(1)}, column {match.group(2)}" if match else "#"
    text = f"{pointer}: xgrammar cannot compile this {guide.guide_type.value} guide: {message}"
    if _UNSATISFIABLE.search(message):
        return UnsatisfiableGuideError(text, pointer=pointer, hint=ALLOW_A_TEXT)
    # a grammar over characters is one that our own readers have found to be well formed
    if _UNSUPPORTED.search(message) or guide.guide_type in TEXT_KINDS:
        return UnsupportedGuideError(text, pointer=pointer, hint=USE_ANOTHER, reasons={_NAME: message})
    return InvalidGuideError(text, pointer=pointer, hint=USE_ANOTHER)
