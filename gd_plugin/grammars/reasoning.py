"""Reasoning: free text up to an end marker, then a guide; a matcher above any backend's.

In:  a compiled guide and its `Reasoning`.
Out: a CompiledGrammar whose matchers begin with free text.

    opening (only with a start marker)  up to 16 bytes of white space, then the start marker; anything else is the guide at
                                        once; white space may stand before the guide, whose own text begins behind it
    free                                any text; ends behind the first occurrence of the end marker, in bytes or as the
                                        special token of that name
    guide                               the guide's own matcher

Bytes behind the end marker in the same token must begin the guide, else that token is illegal: markers split over tokens
or straddled by one need no agreement with the tokenizer. Stop tokens are illegal until the guide allows them. Tokens of
the free part are counted; from `max_tokens` on, only what spells the rest of the end marker is legal.
Kept here: mask = accept set; rollback restores every part of the state.
"""

from collections.abc import Iterable
from operator import index as whole_number
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from gd_plugin.errors import RollbackError, UnsatisfiableGuideError
from gd_plugin.grammars.backends.registry import CompiledGrammar
from gd_plugin.grammars.matcher import GrammarMatcher, checked_row
from gd_plugin.grammars.spelling import Speller
from gd_plugin.grammars.vocabulary import Vocabulary
from gd_plugin.guides.guide import Guide, Reasoning
from gd_plugin.masks.bitmask import num_mask_words

__all__ = ["ReasoningGrammar", "ReasoningMatcher"]

_SPACE = b" \t\r\n"
# White space before a start marker: models write a line end or two; more would be a way never to begin.
_MAX_OPENING_SPACE = 16
_NEVER = _MAX_OPENING_SPACE + 1

_OPENING, _FREE, _GUIDE = range(3)


class _State(NamedTuple):
    """Where a matcher is. The numbers of tokens say how far the two guide matchers have been advanced.

    Attributes:
        phase: _OPENING, _FREE or _GUIDE.
        matched: bytes of the marker matched: of the start marker while opening, of the end marker in free text.
        space: bytes of white space before the start marker.
        num_free: tokens of free text.
        whole: the guide may also have begun with the first token (opening only).
        whole_tokens: tokens accepted by the matcher that began with the first token.
        late_tokens: tokens accepted by the matcher that began behind white space or behind the end marker.
    """

    phase: int
    matched: int = 0
    space: int = 0
    num_free: int = 0
    whole: bool = False
    whole_tokens: int = 0
    late_tokens: int = 0


class ReasoningGrammar(CompiledGrammar):
    """A compiled guide behind free text. Shared between threads.

    Raises:
        UnsatisfiableGuideError: the vocabulary cannot spell the end marker.
    """

    def __init__(self, guide: Guide, inner: CompiledGrammar, vocabulary: Vocabulary) -> None:
        if guide.reasoning is None:
            raise TypeError("the guide has no reasoning")
        self.guide = guide
        self.backend = inner.backend
        self.reason = inner.reason
        self.not_enforced = inner.not_enforced
        self.nbytes = inner.nbytes
        self.inner = inner
        self.plan = _Plan(guide.reasoning, inner, vocabulary)

    def create_matcher(self) -> "ReasoningMatcher":
        """See `CompiledGrammar.create_matcher`."""
        return ReasoningMatcher(self.plan)


class _Plan:
    """What all matchers of one reasoning guide share: the markers, and rows by how much of a marker is matched."""

    def __init__(self, reasoning: Reasoning, inner: CompiledGrammar, vocabulary: Vocabulary) -> None:
        self.vocabulary = vocabulary
        self.inner = inner
        self.speller = Speller.of(vocabulary)
        self.start = None if reasoning.start is None else reasoning.start.encode()
        self.end = reasoning.end.encode()
        self.max_tokens = reasoning.max_tokens
        names = vocabulary.special_token_names
        self.start_id = None if reasoning.start is None else _usable(vocabulary, names.get(reasoning.start))
        self.end_id = _usable(vocabulary, names.get(reasoning.end))
        self.borders = _borders(self.end)
        if self.end_id is None and self.speller.spell(self.end) is None:
            raise UnsatisfiableGuideError(
                f"#/reasoning/end: no tokens of this vocabulary spell the end marker {reasoning.end!r}",
                pointer="#/reasoning/end",
                keyword="end",
                hint="use the marker that the model was trained with",
            )
        self._begins: dict[bytes, bool] = {}
        self._rows: dict[tuple[int, ...], npt.NDArray[np.int32]] = {}
        self._fresh: tuple[npt.NDArray[np.int32], frozenset[int]] | None = None
        self._spaced: tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]] | None = None

    def step_end(self, matched: int, text: bytes) -> tuple[int, int]:
        """Advance the search for the end marker over `text`.

        Returns:
            (matched bytes, offset behind the marker in `text`, or -1 if it is not complete).
        """
        end, borders = self.end, self.borders
        for offset, byte in enumerate(text):
            while matched and end[matched] != byte:
                matched = borders[matched]
            if end[matched] == byte:
                matched += 1
                if matched == len(end):
                    return 0, offset + 1
        return matched, -1

    def begins(self, text: bytes) -> bool:
        """Tell whether a text of the guide can begin with `text`, as far as the vocabulary can spell it."""
        fresh, first_bytes = self._fresh_tokens()
        if text[0] not in first_bytes:
            return False
        token_id = self.speller.token_ids.get(text)
        if token_id is not None:
            return _has(fresh, token_id)
        # not bounded: there are no more texts than ends of tokens behind white space or an end marker
        known = self._begins.get(text)
        if known is None:
            ids = self.speller.spell(text)
            known = (
                ids is not None and _has(fresh, ids[0]) and self.inner.create_matcher().validate_tokens(ids) == len(ids)
            )
            self._begins[text] = known
        return known

    def free_row(self, matched: int, forced: bool) -> npt.NDArray[np.int32]:
        """Return the legal tokens of free text after `matched` bytes of the end marker."""
        key = (matched, int(forced))
        row = self._rows.get(key)
        if row is None:
            row = self.speller.empty_row() if forced else self.speller.text_row.copy()
            candidates = self._forced_candidates(matched) if forced else self._closing_candidates(matched)
            for token_id in candidates:
                _set(row, token_id, self.free_step(matched, self.vocabulary.tokens[token_id], forced) is not None)
            if self.end_id is not None:
                _set(row, self.end_id, True)
            self._rows[key] = row
        return row

    def free_step(self, matched: int, text: bytes, forced: bool) -> tuple[int, bytes | None] | None:
        """Advance free text by a token's bytes.

        Returns:
            None if the token is illegal, else (matched bytes, bytes behind the marker or None if it is not complete).
        """
        rest = self.end[matched:]
        if forced and not (rest.startswith(text) or text.startswith(rest)):
            return None
        matched, behind = self.step_end(matched, text)
        if behind < 0:
            return matched, None
        if behind < len(text) and not self.begins(text[behind:]):
            return None
        return 0, text[behind:]

    def opening_row(self, space: int, matched: int) -> npt.NDArray[np.int32]:
        """Return the tokens that are legal while opening, those aside that begin the guide with the first token."""
        key = (space, matched, -1)
        row = self._rows.get(key)
        if row is not None:
            return row
        start = self.start or b""
        row = self.speller.empty_row()
        candidates = [*self.speller.starting_with(start[matched:])]
        for length in range(1, len(start) - matched):
            candidates.extend(self.speller.equal_to(start[matched : matched + length]))
        if not matched:
            if space:
                row |= self._fresh_tokens()[0]
            if self.start_id is not None:
                _set(row, self.start_id, True)
            self._set_spaced(row, space)
        for token_id in candidates:
            _set(row, token_id, self._opens(space, matched, self.vocabulary.tokens[token_id]))
        self._rows[key] = row
        return row

    def _set_spaced(self, row: npt.NDArray[np.int32], space: int) -> None:
        """Set the tokens that begin with white space, behind `space` bytes of it.

        There are tens of thousands: they are looked at once, since what was written only bounds their own white space.
        """
        if self._spaced is None:
            tokens = self.vocabulary.tokens
            ids = list(self.speller.starting_with_any(_SPACE))
            lengths = [len(tokens[i]) - len(tokens[i].lstrip(_SPACE)) for i in ids]
            most = [n if self._opens(0, 0, tokens[i]) else _NEVER for i, n in zip(ids, lengths, strict=True)]
            self._spaced = np.array(ids, dtype=np.int64), np.array(most, dtype=np.int64)
        token_ids, lengths_needed = self._spaced
        bits = np.unpackbits(row.view(np.uint8), bitorder="little")
        bits[token_ids] = lengths_needed + space <= _MAX_OPENING_SPACE
        row[:] = np.packbits(bits, bitorder="little").view(np.int32)

    def _opens(self, space: int, matched: int, text: bytes) -> bool:
        start = self.start or b""
        _, now, used = opening_step(start, space, matched, text)
        if used < 0:
            return not matched and self.begins_late(space, text)
        if now < len(start) or used == len(text):
            return True
        return self.free_step(0, text[used:], self.max_tokens == 0) is not None

    def begins_late(self, space: int, text: bytes) -> bool:
        """Tell whether `text` is white space and the beginning of the guide, or that beginning behind white space."""
        rest = text.lstrip(_SPACE)
        space += len(text) - len(rest)
        return 0 < space <= _MAX_OPENING_SPACE and bool(rest) and self.begins(rest)

    def _fresh_tokens(self) -> tuple[npt.NDArray[np.int32], frozenset[int]]:
        """Return the row of text tokens that the guide may begin with, and the first bytes of those."""
        if self._fresh is None:
            scratch = torch.zeros((1, len(self.speller.text_row)), dtype=torch.int32)
            self.inner.create_matcher().fill_next_token_bitmask(scratch, 0)
            row: npt.NDArray[np.int32] = scratch.numpy()[0] & self.speller.text_row
            ids = np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little"))
            self._fresh = row, frozenset(self.vocabulary.tokens[token_id][0] for token_id in ids.tolist())
        return self._fresh

    def _closing_candidates(self, matched: int) -> Iterable[int]:
        """Tokens that may complete the end marker after `matched` bytes of it."""
        yield from self.speller.holding(self.end)
        while matched:
            yield from self.speller.starting_with(self.end[matched:])
            matched = self.borders[matched]

    def _forced_candidates(self, matched: int) -> Iterable[int]:
        rest = self.end[matched:]
        yield from self.speller.starting_with(rest)
        for length in range(1, len(rest)):
            yield from self.speller.equal_to(rest[:length])


class ReasoningMatcher(GrammarMatcher):
    """One request's matcher: free text, then the guide's own matcher."""

    def __init__(self, plan: _Plan) -> None:
        self._plan = plan
        self._whole = plan.inner.create_matcher()
        self._late = plan.inner.create_matcher()
        opening = plan.start is not None
        self._states = [_State(_OPENING if opening else _FREE, whole=opening)]

    @property
    def num_tokens(self) -> int:
        """See `GrammarMatcher.num_tokens`."""
        return len(self._states) - 1

    @property
    def is_reasoning(self) -> bool:
        """Tell whether the guide has not begun for certain."""
        return self._states[-1].phase != _GUIDE

    def accept_token(self, token_id: int) -> bool:
        """See `GrammarMatcher.accept_token`."""
        token_id = whole_number(token_id)
        if not 0 <= token_id < self._plan.vocabulary.vocab_size:
            return False
        state = self._next_state(self._states[-1], token_id)
        if state is None:
            return False
        self._states.append(state)
        return True

    def _next_state(self, state: _State, token_id: int) -> _State | None:
        """Advance the guide matchers and return the state behind the token, or return None with nothing changed."""
        if state.phase == _GUIDE:
            return self._step_guide(state, token_id)
        if state.phase == _OPENING:
            opened = self._step_opening(state, token_id)
            return self._step_guides(state, token_id) if opened is None else opened
        return self._step_free(state, token_id)

    def _step_guide(self, state: _State, token_id: int) -> _State | None:
        if state.whole:
            accepted = self._whole.accept_token(token_id)
            return state._replace(whole_tokens=state.whole_tokens + 1) if accepted else None
        accepted = self._late.accept_token(token_id)
        return state._replace(late_tokens=state.late_tokens + 1) if accepted else None

    def _step_free(self, state: _State, token_id: int, text: bytes | None = None) -> _State | None:
        """Advance free text by a token, or by `text`, the part of it that is free."""
        plan = self._plan
        if text is None:
            if token_id == plan.end_id:
                return state._replace(phase=_GUIDE, whole=False, matched=0)
            if token_id in plan.vocabulary.stop_token_set or token_id in plan.vocabulary.special_token_ids:
                return None
            text = plan.vocabulary.tokens[token_id]
        forced = plan.max_tokens is not None and state.num_free >= plan.max_tokens
        step = plan.free_step(state.matched, text, forced)
        if step is None:
            return None
        matched, behind = step
        if behind is None:
            return state._replace(matched=matched, num_free=state.num_free + 1)
        ids = (plan.speller.spell(behind) or []) if behind else []
        for suffix_id in ids:
            self._late.accept_token(suffix_id)
        return state._replace(phase=_GUIDE, whole=False, matched=0, late_tokens=state.late_tokens + len(ids))

    def _step_opening(self, state: _State, token_id: int) -> _State | None:
        """Advance white space and start marker, or return None if the token is neither."""
        plan = self._plan
        start = plan.start or b""
        if token_id == plan.start_id and not state.matched:
            return _State(_FREE, whole_tokens=state.whole_tokens)
        if token_id in plan.vocabulary.stop_token_set or token_id in plan.vocabulary.special_token_ids:
            return None
        text = plan.vocabulary.tokens[token_id]
        space, matched, used = opening_step(start, state.space, state.matched, text)
        if used < 0:
            return None
        if matched < len(start):
            whole = state.whole and self._whole.accept_token(token_id)
            return state._replace(
                space=space, matched=matched, whole=whole, whole_tokens=state.whole_tokens + int(whole)
            )
        opened = _State(_FREE, whole_tokens=state.whole_tokens)
        return opened if used == len(text) else self._step_free(opened, token_id, text[used:])

    def _step_guides(self, state: _State, token_id: int) -> _State | None:
        """The token is no start marker: the guide applies, from the first token on or behind the white space."""
        if state.whole and self._whole.accept_token(token_id):
            return state._replace(phase=_GUIDE, matched=0, whole_tokens=state.whole_tokens + 1)
        plan = self._plan
        vocabulary = plan.vocabulary
        if state.matched or token_id in vocabulary.stop_token_set:
            return None
        text = vocabulary.tokens[token_id]
        if not plan.begins_late(state.space, text):
            return None
        ids = plan.speller.spell(text.lstrip(_SPACE)) or []
        for suffix_id in ids:
            self._late.accept_token(suffix_id)
        return state._replace(phase=_GUIDE, whole=False, matched=0, late_tokens=len(ids))

    def rollback(self, num_tokens: int) -> None:
        """See `GrammarMatcher.rollback`."""
        num_tokens = whole_number(num_tokens)
        if not 0 <= num_tokens <= self.num_tokens:
            raise RollbackError(f"cannot roll back {num_tokens} tokens: {self.num_tokens} have been accepted")
        if num_tokens == 0:
            return
        before, here = self._states[-1 - num_tokens], self._states[-1]
        self._whole.rollback(here.whole_tokens - before.whole_tokens)
        self._late.rollback(here.late_tokens - before.late_tokens)
        del self._states[-num_tokens:]

    def fill_next_token_bitmask(self, bitmask: torch.Tensor, index: int) -> None:
        """See `GrammarMatcher.fill_next_token_bitmask`."""
        state = self._states[-1]
        if state.phase == _GUIDE:
            (self._whole if state.whole else self._late).fill_next_token_bitmask(bitmask, index)
            return
        plan = self._plan
        num_words = num_mask_words(plan.vocabulary.vocab_size)
        row: npt.NDArray[np.int32] = checked_row(bitmask, index, num_words).numpy()
        if state.phase == _FREE:
            forced = plan.max_tokens is not None and state.num_free >= plan.max_tokens
            row[:num_words] = plan.free_row(state.matched, forced)
        else:
            if state.whole:
                self._whole.fill_next_token_bitmask(bitmask, index)
            else:
                row[:num_words] = 0
            row[:num_words] |= plan.opening_row(state.space, state.matched)
        row[num_words:] = 0

    def is_terminated(self) -> bool:
        """See `GrammarMatcher.is_terminated`."""
        state = self._states[-1]
        return state.phase == _GUIDE and (self._whole if state.whole else self._late).is_terminated()

    def is_accepting(self) -> bool:
        """See `GrammarMatcher.is_accepting`."""
        state = self._states[-1]
        if state.phase == _FREE:
            return False
        return self._whole.is_accepting() if state.whole else state.phase == _GUIDE and self._late.is_accepting()

    def fork(self) -> "ReasoningMatcher":
        """See `GrammarMatcher.fork`."""
        twin = ReasoningMatcher.__new__(ReasoningMatcher)
        twin._plan = self._plan
        twin._whole = self._whole.fork()
        twin._late = self._late.fork()
        twin._states = list(self._states)
        return twin

    def reset(self) -> None:
        """See `GrammarMatcher.reset`."""
        self._whole.reset()
        self._late.reset()
        del self._states[1:]

    def forced_text(self) -> bytes:
        """See `GrammarMatcher.forced_text`."""
        state = self._states[-1]
        if state.phase == _GUIDE:
            return (self._whole if state.whole else self._late).forced_text()
        plan = self._plan
        forced = plan.max_tokens is not None and state.phase == _FREE and state.num_free >= plan.max_tokens
        # a special token has no bytes: where one would do, no text is forced
        return plan.end[state.matched :] if forced and plan.end_id is None else b""


def opening_step(start: bytes, space: int, matched: int, text: bytes) -> tuple[int, int, int]:
    """Advance white space and start marker over `text`.

    Returns:
        (bytes of white space, bytes of the marker, bytes of `text` that were used, or -1 if it is neither).
    """
    used = 0
    if not matched:
        while used < len(text) and text[used] in _SPACE:
            used += 1
        space += used
        if space > _MAX_OPENING_SPACE:
            return space, matched, -1
    length = min(len(text) - used, len(start) - matched)
    if text[used : used + length] != start[matched : matched + length]:
        return space, matched, -1
    return space, matched + length, used + length


def _borders(marker: bytes) -> list[int]:
    """Return for each length the longest proper prefix of the marker that is also a suffix of that many bytes."""
    borders = [0] * (len(marker) + 1)
    length = 0
    for position in range(1, len(marker)):
        while length and marker[length] != marker[position]:
            length = borders[length]
        length += marker[length] == marker[position]
        borders[position + 1] = length
    return borders


def _usable(vocabulary: Vocabulary, token_id: int | None) -> int | None:
    """A stop token cannot be a marker: it ends the row."""
    return None if token_id is None or token_id in vocabulary.stop_token_set else token_id


def _has(row: npt.NDArray[np.int32], token_id: int) -> bool:
    return bool(row[token_id >> 5] >> (token_id & 31) & 1)


def _set(row: npt.NDArray[np.int32], token_id: int, value: bool) -> None:
    bit = np.uint32(1 << (token_id & 31)).view(np.int32)
    if value:
        row[token_id >> 5] |= bit
    else:
        row[token_id >> 5] &= ~bit
