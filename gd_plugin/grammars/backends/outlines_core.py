"""outlines-core behind the contract of grammars/matcher.py.

In:  a Guide and a Vocabulary.      Out: a CompiledGrammar whose matchers behave as the contract says.
The engine knows one stop token, loses transitions and takes the leftmost alternative (0.2.14: `a|ab` refuses "ab"), because
it leaves an automaton at the first match. So it never meets one: the regex it is given ends in a character that no text
of the guide holds, under a token id that no mask has room for, and the text is complete where that token would be legal.
Its index has a transition for each state and token, so a guide is only taken if a bounded estimate says that building it
fits into `compile_timeout_s`. Sources: outlines-core 0.2.14, its stubs, and experiment.
"""

import threading
import weakref
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import outlines_core

from gd_plugin.config import GuidedDecodingConfig
from gd_plugin.errors import (
    BackendNotInstalledError,
    GuideError,
    GuideTooLargeError,
    InvalidGuideError,
    UnsatisfiableGuideError,
    UnsupportedGuideError,
    VocabularyError,
)
from gd_plugin.grammars.backends.registry import ALLOW_A_TEXT, USE_ANOTHER, Backend, CompiledGrammar
from gd_plugin.grammars.matcher import EngineMatcher, engine_errors
from gd_plugin.grammars.vocabulary import Vocabulary
from gd_plugin.guides.automaton import estimate_states
from gd_plugin.guides.expression import NOTHING, Literal, Node, sequence, to_rust_regex
from gd_plugin.guides.grammar import to_regular
from gd_plugin.guides.guide import Guide
from gd_plugin.guides.language import TEXT_KINDS, language_of, unused_character
from gd_plugin.guides.problem import Problem

__all__ = ["OutlinesCoreBackend", "OutlinesCoreMatcher", "create_backend"]

_NAME: Final = "outlines_core"
_INSTALL: Final = "outlines-core>=0.2.14"
# past every mask: the engine drops ids that its buffer has no bit for
_SENTINEL_ID: Final = 1 << 30
# measured at 50k and 152k tokens: 0.16 to 0.36 us a state and token
_BUILD_S_PER_STATE_AND_TOKEN: Final = 4e-7
# a row a state is kept
_MAX_STATES: Final = 5000
_BYTES_PER_TRANSITION: Final = 16
# of memory, for each byte of an index's serialisation: 4 bytes of a token and 4 of a state are 16 in a hash table
_NBYTES_PER_BYTE: Final = 2
# an index that should take longer than this is built in another process
_MAX_BUILD_S_HERE: Final = 0.5

_SIMPLIFY: Final = "shorten its repeats and sets, raise the limit, or use another backend"

_vocabularies: "weakref.WeakKeyDictionary[Vocabulary, dict[str, Any]]" = weakref.WeakKeyDictionary()
_lock = threading.Lock()


def create_backend(vocabulary: Vocabulary, config: GuidedDecodingConfig) -> Backend:
    """Return the outlines-core backend for `vocabulary` and `config`.

    Raises:
        BackendNotInstalledError: the installed version lacks what this adapter needs.
    """
    missing = [name for name in ("write_mask_into", "advance") if not hasattr(outlines_core.Guide, name)]
    missing += [name for name in ("get_next_state", "is_final_state") if not hasattr(outlines_core.Index, name)]
    if missing:
        raise BackendNotInstalledError(
            f"the installed outlines-core is too old (it lacks {', '.join(missing)}): pip install '{_INSTALL}'",
            name=_NAME,
        )
    return OutlinesCoreBackend(vocabulary, config)


class OutlinesCoreMatcher(EngineMatcher):
    """One request's place in an index: a list of states, the first being the initial one.

    The engine's own guide object is not used: its rollback is bounded, and what its `reset` leaves behind can be rolled
    back into. A state's row is built once, of a list of up to all tokens, and shared by all matchers of the grammar.
    """

    engine = "outlines-core"

    def __init__(self, vocabulary: Vocabulary, index: Any, rows: dict[int, npt.NDArray[np.int32]]) -> None:
        super().__init__(vocabulary)
        self._index = index
        self._rows = rows
        self._states: list[int] = [index.get_initial_state()]

    def _engine_accept(self, token_id: int) -> bool:
        state = self._index.get_next_state(self._states[-1], token_id)
        if state is None:
            return False
        self._states.append(state)
        return True

    def _engine_rollback(self, num_tokens: int) -> None:
        del self._states[-num_tokens:]

    def _engine_fill(self, rows: npt.NDArray[np.int32], index: int, address: int) -> None:
        known = self._rows.get(self._states[-1])
        if known is None:
            known = self._rows[self._states[-1]] = self._build_row(self._states[-1])
        rows[index, : self._num_words] = known

    def _build_row(self, state: int) -> npt.NDArray[np.int32]:
        allowed = self._index.get_allowed_tokens(state) or ()
        bits = np.zeros(32 * self._num_words, dtype=np.uint8)
        ids = np.fromiter(allowed, dtype=np.int64)
        bits[ids[ids < self._vocabulary.vocab_size]] = 1
        return np.packbits(bits, bitorder="little").view(np.int32)

    def _engine_accepting(self) -> bool:
        end = self._index.get_next_state(self._states[-1], _SENTINEL_ID)
        return end is not None and bool(self._index.is_final_state(end))

    def _engine_fork(self) -> "OutlinesCoreMatcher":
        twin = OutlinesCoreMatcher(self._vocabulary, self._index, self._rows)
        twin._states = list(self._states)
        return twin

    def _engine_reset(self) -> None:
        del self._states[1:]


class OutlinesCoreCompiledGrammar(CompiledGrammar):
    """A guide compiled by outlines-core."""

    backend = _NAME

    def __init__(self, guide: Guide, vocabulary: Vocabulary, index: Any, nbytes: int) -> None:
        self.guide = guide
        self.nbytes = nbytes
        self.index = index
        self._vocabulary = vocabulary
        self._rows: dict[int, npt.NDArray[np.int32]] = {}

    def create_matcher(self) -> OutlinesCoreMatcher:
        """See `CompiledGrammar.create_matcher`."""
        return OutlinesCoreMatcher(self._vocabulary, self.index, self._rows)


class OutlinesCoreBackend(Backend):
    """outlines-core for one vocabulary and one configuration. Safe to use from several threads."""

    name = _NAME

    def __init__(self, vocabulary: Vocabulary, config: GuidedDecodingConfig) -> None:
        self._vocabulary = vocabulary
        self._per_state_s = _BUILD_S_PER_STATE_AND_TOKEN * vocabulary.vocab_size
        self._max_states_here = int(_MAX_BUILD_S_HERE / self._per_state_s)
        affordable = int(config.compile_timeout_s / self._per_state_s)
        self._max_states = max(1, min(affordable, _MAX_STATES))

    def problems(self, guide: Guide) -> list[Problem]:
        """See `Backend.problems`."""
        if guide.guide_type not in TEXT_KINDS:
            kind = guide.guide_type.value
            return [
                Problem("#", kind, _NAME, f"{kind} guides have no exact regex, and outlines-core takes nothing else")
            ]
        if guide.reasoning is not None:
            return [Problem("#", "reasoning", _NAME, "free text before a guide is not part of an outlines-core regex")]
        grammar = language_of(guide)
        if grammar.recursive_rules():
            return [Problem("#", "recursion", _NAME, "rules that refer to themselves have no regex")]
        node = to_regular(grammar)
        if node is None:
            return [Problem("#", "size", _NAME, "the guide is too large to be written as one regex")]
        if unused_character(node) is None:
            return [
                Problem("#", "alphabet", _NAME, "texts may hold every ASCII character; outlines-core needs one unused")
            ]
        if estimate_states(node, self._max_states) is None:
            message = (
                f"the index would have over {self._max_states} states of {self._vocabulary.vocab_size} tokens and "
                "take longer than compile_timeout_s to build"
            )
            return [Problem("#", "size", _NAME, message)]
        return []

    def estimate_compile_s(self, guide: Guide) -> float | None:
        """See `Backend.estimate_compile_s`: states times tokens. None also past what `compile_timeout_s` allows."""
        node = to_regular(language_of(guide)) if guide.guide_type in TEXT_KINDS else None
        states = None if node is None else estimate_states(node, self._max_states)
        return None if states is None else states * self._per_state_s

    def is_large(self, guide: Guide) -> bool:
        """See `Backend.is_large`."""
        if guide.guide_type not in TEXT_KINDS:
            return False
        node = to_regular(language_of(guide))
        return node is None or estimate_states(node, self._max_states_here) is None

    def compile(self, guide: Guide) -> CompiledGrammar:
        """See `Backend.compile`. Holds no lock of Python's while the index is built."""
        for problem in self.problems(guide):
            text = f"{problem.pointer}: {problem.message}"
            if problem.keyword == "size":
                raise GuideTooLargeError(text, pointer="#", limit="compile_timeout_s", hint=_SIMPLIFY)
            raise UnsupportedGuideError(
                text,
                pointer=problem.pointer,
                keyword=problem.keyword,
                hint=USE_ANOTHER,
                reasons={_NAME: problem.message},
            )
        node = to_regular(language_of(guide))
        end = unused_character(node) if node is not None else None
        if node is None or end is None or node == NOTHING:
            raise UnsatisfiableGuideError("#: nothing matches this guide", pointer="#", hint=ALLOW_A_TEXT)
        num_states = estimate_states(node, self._max_states) or self._max_states
        vocabulary = _engine_vocabulary(self._vocabulary, end)
        try:
            index = outlines_core.Index(_end_with(node, end), vocabulary)
        except engine_errors() as error:
            raise _guide_error(guide, error) from error
        # the engine does not tell; every token may have a transition in every state
        nbytes = num_states * self._vocabulary.vocab_size * _BYTES_PER_TRANSITION
        return OutlinesCoreCompiledGrammar(guide, self._vocabulary, index, nbytes)

    def dump(self, compiled: CompiledGrammar) -> bytes:
        """See `Backend.dump`. What the engine gives to be pickled is a number of bytes, and its own reader for them."""
        if not isinstance(compiled, OutlinesCoreCompiledGrammar):
            raise TypeError(f"not compiled by outlines-core: {type(compiled).__name__}")
        _, (data,) = compiled.index.__reduce__()
        return bytes(data)

    def load(self, guide: Guide, data: bytes) -> CompiledGrammar:
        """See `Backend.load`."""
        try:
            index = outlines_core.Index.from_binary(data)
        except engine_errors() as error:
            raise _guide_error(guide, error) from error
        return OutlinesCoreCompiledGrammar(guide, self._vocabulary, index, _NBYTES_PER_BYTE * len(data))


def _end_with(node: Node, end: str) -> str:
    return to_rust_regex(sequence([node, Literal(end)]))


def _engine_vocabulary(vocabulary: Vocabulary, end: str) -> Any:
    """Return the engine's view of the vocabulary, in which only the sentinel spells `end`."""
    with _lock:
        by_end = _vocabularies.setdefault(vocabulary, {})
        if end not in by_end:
            sentinel = end.encode()
            ids: dict[bytes, list[int]] = {}
            for token_id, token in enumerate(vocabulary.tokens):
                if token and sentinel not in token and token_id not in vocabulary.stop_token_set:
                    ids.setdefault(token, []).append(token_id)
            # the engine refuses a guide in which some text ends in a byte without a token; no mask has room for these
            for byte in range(256):
                ids.setdefault(bytes([byte]), [_SENTINEL_ID + 1 + byte])
            ids[sentinel] = [_SENTINEL_ID]
            try:
                by_end[end] = outlines_core.Vocabulary(vocabulary.stop_token_ids[0], ids)
            except engine_errors() as error:
                raise VocabularyError(f"outlines-core cannot read this vocabulary: {error}") from error
        return by_end[end]


def _guide_error(guide: Guide, error: BaseException) -> GuideError:
    """Translate whatever the engine raised while it built an index."""
    message = str(error).strip().splitlines()[0][:300] if str(error).strip() else type(error).__name__
    text = f"#: outlines-core cannot compile this {guide.guide_type.value} guide: {message}"
    if "incompatible with the regex" in message:
        # a byte of every text has no token
        return UnsatisfiableGuideError(f"{text}; no token of this vocabulary spells it", pointer="#", hint=ALLOW_A_TEXT)
    if "too big" in message or "exceed" in message:
        return GuideTooLargeError(text, pointer="#", limit="compile_timeout_s", hint=_SIMPLIFY)
    return InvalidGuideError(text, pointer="#", hint=USE_ANOTHER)
