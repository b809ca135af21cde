"""llguidance behind the contract of grammars/matcher.py.

In:  a Guide and a Vocabulary.      Out: a CompiledGrammar whose matchers behave as the contract says.
Kept here: every guide is spelled as Lark with `no_forcing`, because otherwise masks hold only the tokenizer's own spelling
of forced text and are narrower than the accept set. Its errors are for good: whatever puts a matcher into one is avoided,
and what cannot be (a dead end found while a row is filled, a limit) is repaired by replaying the tokens in a new copy.
Sources: llguidance 1.9.1, its stubs and docs/syntax.md, and experiment.
"""

import json
import re
import weakref
from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import count
from typing import Any, Final, NamedTuple

import llguidance
import numpy as np
import numpy.typing as npt
import torch

from gd_plugin.config import GuidedDecodingConfig
from gd_plugin.errors import (
    BackendNotInstalledError,
    GuideError,
    InvalidGuideError,
    MatcherError,
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
from gd_plugin.grammars.matcher import EngineMatcher, engine_errors, num_cores
from gd_plugin.grammars.vocabulary import Vocabulary
from gd_plugin.guides.grammar import to_lark
from gd_plugin.guides.guide import Guide, GuideType
from gd_plugin.guides.language import TEXT_KINDS, language_of
from gd_plugin.guides.limits import compile_weight, num_written_positions
from gd_plugin.guides.problem import Problem
from gd_plugin.guides.schema import schema_problems, schema_to_lark
from gd_plugin.guides.structural_lark import lexer_conflict, to_structural_lark

__all__ = ["LLGuidanceBackend", "LLGuidanceMatcher", "create_backend"]

_NAME: Final = "llguidance"
_INSTALL: Final = "llguidance>=1.7"
_TAKES: Final = frozenset({GuideType.JSON, GuideType.JSON_SCHEMA, GuideType.STRUCTURAL_TAG}) | TEXT_KINDS
_EXACT_MASKS: Final = '%llguidance {"no_forcing": true}\n'
# a copy of the engine, 4 to 16 us, each so many tokens, and wherever a rollback led: a replay costs 2 us a token and more
_CHECKPOINT_TOKENS: Final = 64
_MAX_CHECKPOINTS: Final = 32
# the engine does not tell: its lexer holds 1-2 kB a state, and thousands of states are common
_BASE_NBYTES: Final = 1 << 20

_MAX_STARTS: Final = 4
# it panics on longer ones
_MAX_TOKEN_BYTES: Final = 1024
# measured: regexes from 1.5 million on fail while masks are made, where it is too late to refuse them
_MAX_WEIGHT: Final = 500_000
# above either, building an engine takes tenths of a second to seconds; 2,000 characters that are each optional took 1.4 s
# on a busy machine, a time that grows with the square of their number
_WORKER_WEIGHT: Final = 50_000
_WORKER_POSITIONS: Final = 1_000
# a schema's normal form is made in counted steps, and the engine's own steps are counted
_SCHEMA_WORKER_WEIGHT: Final = 200_000

_tokenizers: "weakref.WeakKeyDictionary[Vocabulary, Any]" = weakref.WeakKeyDictionary()


def create_backend(vocabulary: Vocabulary, config: GuidedDecodingConfig) -> Backend:
    """Return the llguidance backend for `vocabulary` and `config`.

    Raises:
        BackendNotInstalledError: the installed version lacks what this adapter needs.
    """
    needed = ("try_consume_tokens", "deep_copy", "unsafe_compute_mask_ptr", "is_error")
    missing = [name for name in needed if not hasattr(llguidance.LLMatcher, name)]
    if missing:
        raise BackendNotInstalledError(
            f"the installed llguidance is too old (it lacks {', '.join(missing)}): pip install '{_INSTALL}'", name=_NAME
        )
    return LLGuidanceBackend(vocabulary, config)


class _Checkpoint(NamedTuple):
    num_tokens: int
    engine: Any


class LLGuidanceMatcher(EngineMatcher):
    """One request's llguidance matcher.

    The engine's own `rollback` is not used: in grammars with several rules later masks can allow tokens that are then
    refused (1.9.1). A rollback takes the last checkpoint before it and consumes what is left.
    """

    engine = _NAME
    fills_whole_row = True
    # 49k tokens: the executor is 2.0 to 2.3 times as fast as a loop at 64 rows on two idle cores, 0.8 times on busy ones
    batch_break_even = 32

    def __init__(self, vocabulary: Vocabulary, start: Any) -> None:
        super().__init__(vocabulary)
        self._start = start
        self._engine = start.deep_copy()
        self._row_nbytes = 4 * self._num_words
        self._history: list[int] = []
        self._checkpoints: list[_Checkpoint] = []

    def _engine_accept(self, token_id: int) -> bool:
        history = self._history
        if history and not len(history) % _CHECKPOINT_TOKENS:
            self._add_checkpoint(self._engine.deep_copy())
        # not consume_token: a token refused there leaves the engine in an error for good
        if self._engine.try_consume_tokens([token_id]):
            history.append(token_id)
            return True
        if self._engine.is_error():
            self._fail()
        return False

    def _add_checkpoint(self, engine: Any) -> None:
        """Keep `engine`, which is behind the whole history and is not going to move."""
        checkpoints, here = self._checkpoints, len(self._history)
        if checkpoints and checkpoints[-1].num_tokens == here:
            return
        checkpoints.append(_Checkpoint(here, engine))
        if len(checkpoints) > _MAX_CHECKPOINTS:
            # the older they are, the fewer are left
            del checkpoints[: _MAX_CHECKPOINTS // 2 : 2]

    def _engine_rollback(self, num_tokens: int) -> None:
        self._move_to(len(self._history) - num_tokens)

    def _move_to(self, num_tokens: int) -> None:
        """Put a fresh engine behind the first `num_tokens` of the history, and forget the rest."""
        checkpoints = self._checkpoints
        kept = len(checkpoints)
        while kept and checkpoints[kept - 1].num_tokens > num_tokens:
            kept -= 1
        known = checkpoints[kept - 1] if kept else _Checkpoint(0, self._start)
        engine = known.engine.deep_copy()
        rest = self._history[known.num_tokens : num_tokens]
        if rest and engine.try_consume_tokens(rest) != len(rest):
            raise MatcherError(f"llguidance refused tokens it had accepted: {_first_line(engine.get_error())}")
        del self._history[num_tokens:], checkpoints[kept:]
        if rest:
            # drafts are rolled back to the same place, or to one a little further on
            self._add_checkpoint(engine)
            engine = engine.deep_copy()
        self._engine = engine

    def _engine_fill(self, rows: npt.NDArray[np.int32], index: int, address: int) -> None:
        self._engine.unsafe_compute_mask_ptr(address, self._row_nbytes)
        if self._engine.is_error():
            self._repair_fill(rows[index])

    def _repair_fill(self, row: npt.NDArray[np.int32]) -> None:
        # in an error the engine's mask holds the stop tokens alone, which would end the text in silence
        if not _is_dead_end(self._engine.get_error()):
            self._fail()
        self._move_to(len(self._history))
        row[:] = 0
        self._finish_row(row)

    @classmethod
    def _engine_fill_many(
        cls, matchers: "Sequence[LLGuidanceMatcher]", bitmask: torch.Tensor, indices: Sequence[int], num_threads: int
    ) -> dict[int, Exception]:
        engines = [(matcher._engine, index) for matcher, index in zip(matchers, indices, strict=True)]
        _executor(num_threads).unsafe_compute_mask_ptr(
            engines, bitmask.data_ptr(), bitmask.shape[1] * bitmask.element_size(), bitmask.shape[0]
        )
        errors: dict[int, Exception] = {}
        for position, matcher in enumerate(matchers):
            if matcher._engine.is_error():
                try:
                    matcher._repair_fill(bitmask[indices[position]].numpy())
                except MatcherError as error:
                    errors[position] = error
        return errors

    def _fail(self) -> None:
        """Repair the engine and raise its error."""
        message = self._engine.get_error()
        self._move_to(len(self._history))
        raise MatcherError(f"llguidance failed while matching: {_first_line(message)}")

    def _engine_accepting(self) -> bool:
        return bool(self._engine.is_accepting())

    def _engine_fork(self) -> "LLGuidanceMatcher":
        twin = LLGuidanceMatcher(self._vocabulary, self._start)
        twin._engine = self._engine.deep_copy()
        twin._history = list(self._history)
        # engines in checkpoints are never advanced, so both can hold them
        twin._checkpoints = list(self._checkpoints)
        return twin

    def _engine_reset(self) -> None:
        self._move_to(0)

    @staticmethod
    def _engine_message(error: BaseException) -> str:
        return _first_line(str(error))


class LLGuidanceCompiledGrammar(CompiledGrammar):
    """A guide compiled by llguidance."""

    backend = _NAME

    def __init__(self, guide: Guide, vocabulary: Vocabulary, lark: str, build: Callable[[], Any]) -> None:
        self.guide = guide
        self.lark = lark
        self._vocabulary = vocabulary
        self._build = build
        self._starts = [build()]
        self._created = count()
        # copies of an engine share its lexer behind a lock, so threads filling rows of copies wait for each other
        self._num_starts = min(num_cores(), _MAX_STARTS)
        self.nbytes = self._num_starts * (_BASE_NBYTES + 16 * len(guide.guide))

    def create_matcher(self) -> LLGuidanceMatcher:
        """See `CompiledGrammar.create_matcher`. The first few of a grammar build its engine anew, milliseconds each."""
        turn = next(self._created) % self._num_starts
        starts = self._starts
        if turn >= len(starts):
            starts.append(self._build())
        return LLGuidanceMatcher(self._vocabulary, starts[turn] if turn < len(starts) else starts[-1])


class LLGuidanceBackend(Backend):
    """llguidance for one vocabulary and one configuration. Safe to use from several threads."""

    name = _NAME

    def __init__(self, vocabulary: Vocabulary, config: GuidedDecodingConfig) -> None:
        self._vocabulary = vocabulary
        self._config = config
        self._longest_token = max(map(len, vocabulary.tokens))

    def problems(self, guide: Guide) -> list[Problem]:
        """See `Backend.problems`."""
        if guide.guide_type not in _TAKES:
            kind = guide.guide_type.value
            return [Problem("#", kind, _NAME, f"{kind} guides cannot be enforced by llguidance; use backend='auto'")]
        if guide.reasoning is not None:
            return [Problem("#", "reasoning", _NAME, "free text before a guide is not part of an llguidance grammar")]
        if self._longest_token > _MAX_TOKEN_BYTES:
            message = f"a token of the vocabulary has {self._longest_token} bytes, llguidance takes {_MAX_TOKEN_BYTES}"
            return [Problem("#", "vocabulary", _NAME, message)]
        if guide.guide_type in TEXT_KINDS and compile_weight(guide) > _MAX_WEIGHT:
            message = f"with its repeats written out the guide has over {_MAX_WEIGHT} ranges of characters"
            return [Problem("#", "size", _NAME, f"{message}; masks would fail at the engine's limits")]
        if guide.guide_type is GuideType.STRUCTURAL_TAG:
            found = embedded_problems(self, guide)
            if not found and lexer_conflict(json.loads(guide.guide)["format"]):
                message = (
                    "its lexer would cut texts otherwise where free text or JSON stands beside or before other text"
                )
                found.append(Problem("#/format", "format", _NAME, message))
            return found
        if guide.guide_type is GuideType.JSON_SCHEMA:
            return schema_problems(guide.guide, self._config, _NAME)
        return []

    def is_large(self, guide: Guide) -> bool:
        """See `Backend.is_large`."""
        is_schema = guide.guide_type is GuideType.JSON_SCHEMA
        if compile_weight(guide) > (_SCHEMA_WORKER_WEIGHT if is_schema else _WORKER_WEIGHT):
            return True
        # a choice is of literals, none of them optional
        return guide.guide_type is not GuideType.CHOICE and num_written_positions(guide) > _WORKER_POSITIONS

    def compile(self, guide: Guide) -> CompiledGrammar:
        """See `Backend.compile`."""
        for problem in self.problems(guide):
            if (
                guide.guide_type is GuideType.JSON_SCHEMA
                and not self._config.strict
                and problem.keyword != "vocabulary"
            ):
                break
            raise UnsupportedGuideError(
                f"{problem.pointer}: {problem.message}",
                pointer=problem.pointer,
                keyword=problem.keyword,
                hint=USE_ANOTHER,
                reasons={_NAME: problem.message},
            )
        return self._built(guide, _EXACT_MASKS + self._lark(guide))

    def dump(self, compiled: CompiledGrammar) -> bytes:
        """See `Backend.dump`. The engine has no serialisation; its grammar's text saves writing that again."""
        if not isinstance(compiled, LLGuidanceCompiledGrammar):
            raise TypeError(f"not compiled by llguidance: {type(compiled).__name__}")
        return compiled.lark.encode()

    def load(self, guide: Guide, data: bytes) -> CompiledGrammar:
        """See `Backend.load`."""
        return self._built(guide, data.decode())

    def _built(self, guide: Guide, lark: str) -> CompiledGrammar:
        def build() -> Any:
            try:
                # the constructor reports through is_error, never by raising, and prints unless log_level is 0
                engine = llguidance.LLMatcher(_engine_tokenizer(self._vocabulary), lark, log_level=0, limits=_limits())
            except engine_errors() as error:
                raise _guide_error(guide, str(error)) from error
            if engine.is_error():
                raise _guide_error(guide, engine.get_error())
            return engine

        return LLGuidanceCompiledGrammar(guide, self._vocabulary, lark, build)

    def _lark(self, guide: Guide) -> str:
        if guide.guide_type is GuideType.JSON:
            return _json_lark(guide.guide, self._space())
        if guide.guide_type is GuideType.JSON_SCHEMA:
            return schema_to_lark(guide.guide, self._config)
        if guide.guide_type is GuideType.STRUCTURAL_TAG:
            form = json.loads(guide.guide)["format"]
            return to_structural_lark(form, self._embedded_schema)
        return to_lark(language_of(guide))

    def _embedded_schema(self, schema: Any) -> str:
        """A schema inside another grammar."""
        return f"%lark {{\n{schema_to_lark(json.dumps(schema), self._config)}}}"

    def _space(self) -> str:
        """Regex of the white space between two tokens of a document."""
        if self._config.whitespace == "compact":
            return ""
        repeat = f"{{0,{self._config.max_whitespace}}}" if self._config.whitespace == "bounded" else "*"
        return f"[ \\t\\r\\n]{repeat}"


def _limits() -> Any:
    """The engine's limits, raised: its defaults end a request in the middle of an object with thousands of keys."""
    return llguidance.LLParserLimits(
        max_items_in_row=200_000,
        initial_lexer_fuel=50_000_000,
        step_lexer_fuel=10_000_000,
        step_max_items=1_000_000,
        max_lexer_states=1_000_000,
        max_grammar_size=5_000_000,
    )


@lru_cache(maxsize=4)
def _executor(num_threads: int) -> Any:
    """Return the engine's thread pool of that size."""
    return llguidance.LLExecutor(num_threads)


def _engine_tokenizer(vocabulary: Vocabulary) -> Any:
    """Return the engine's view of the vocabulary. Two threads may both build it; either result is good."""
    tokenizer = _tokenizers.get(vocabulary)
    if tokenizer is None:
        try:
            wrapper = llguidance.TokenizerWrapper(_Tokens(vocabulary))
            tokenizer = llguidance.LLTokenizer(wrapper, eos_token=list(vocabulary.stop_token_ids))
        except engine_errors() as error:
            raise VocabularyError(f"llguidance cannot read this vocabulary: {_first_line(str(error))}") from error
        _tokenizers[vocabulary] = tokenizer
    return tokenizer


class _Tokens:
    """What `llguidance.TokenizerWrapper` asks of a tokenizer. Padding is in the tokens: it ignores `n_vocab`."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.eos_token_id = vocabulary.stop_token_ids[0]
        self.bos_token_id = None
        self.tokens = list(vocabulary.tokens)
        for token_id in vocabulary.stop_token_ids:
            self.tokens[token_id] = b""
        self.special_token_ids: list[int] = []

    def __call__(self, text: str | bytes) -> list[int]:
        # asked for the tokenizer's own spelling of forced text, which no_forcing turns off
        return []


def _json_lark(root: str, space: str) -> str:
    """JSON as the standard has it: every escape, no white space outside."""
    gap = "_S" if space else '""'
    return rf"""start: {"object" if root == "object" else "value"}
value: object | array | STRING | NUMBER | "true" | "false" | "null"
object: "{{" {gap} "}}" | "{{" {gap} member ({gap} "," {gap} member)* {gap} "}}"
member: STRING {gap} ":" {gap} value
array: "[" {gap} "]" | "[" {gap} value ({gap} "," {gap} value)* {gap} "]"
STRING: /"([^"\\\x00-\x1f]|\\(["\\\/bfnrt]|u[0-9A-Fa-f]{{4}}))*"/
NUMBER: /-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+\-]?[0-9]+)?/
{f"_S: /{space}/" if space else ""}
"""


_UNSATISFIABLE: Final = re.compile(r"unsatisfiable|schema is false", re.I)
_UNSUPPORTED: Final = re.compile(
    r"unimplemented|not supported|unsupported|unknown format|are not supported|too (complex|large|big)|limit", re.I
)


def _first_line(message: str) -> str:
    """The engine's own sentence: behind it stand a dump of its state, or an excerpt of the Lark text."""
    text = message.partition("\n<state>")[0].strip()
    lines = [line for line in text.splitlines() if not re.match(r"\s*(\d+ \||\^+\s*$)", line)]
    return " ".join(line.strip() for line in lines if line.strip())[:500]


def _is_dead_end(message: str) -> bool:
    return message.startswith("NoExtension")


def _guide_error(guide: Guide, message: str) -> GuideError:
    """Translate what the engine says about `guide`; positions in it are those of the Lark text, so they are dropped."""
    sentence = re.sub(r"^(at )?\d+\(\d+\): ", "", _first_line(message))
    pointer, keyword = "#", None
    text = f"{pointer}: llguidance cannot compile this {guide.guide_type.value} guide: {sentence}"
    if _UNSATISFIABLE.search(sentence):
        return UnsatisfiableGuideError(text, pointer=pointer, keyword=keyword, hint=ALLOW_A_TEXT)
    # a grammar over characters is one that our own readers have found to be well formed
    if _UNSUPPORTED.search(sentence) or guide.guide_type in TEXT_KINDS:
        return UnsupportedGuideError(
            text, pointer=pointer, keyword=keyword, hint=USE_ANOTHER, reasons={_NAME: sentence}
        )
    return InvalidGuideError(text, pointer=pointer, keyword=keyword, hint=USE_ANOTHER)
