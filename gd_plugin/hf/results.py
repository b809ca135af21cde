"""What became of each row: complete, truncated, dead end or unguided.

The processor never sees the last token of a row, and beams and drafts reorder rows, so final states are read from what
`generate` returned, by a fresh matcher.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from gd_plugin.errors import DeadEndError
from gd_plugin.grammars.backends.registry import CompiledGrammar
from gd_plugin.grammars.dead_ends import dead_end_error
from gd_plugin.grammars.matcher import GrammarMatcher
from gd_plugin.grammars.vocabulary import Vocabulary, text_of
from gd_plugin.hf.session import Session, guide_of_row
from gd_plugin.masks.bitmask import allocate_token_bitmask, row_has_valid_token

__all__ = ["RowResult", "read_results", "read_running_results"]


@dataclass
class RowResult:
    """What became of one row.

    Attributes:
        status: "complete" (the text matches the whole guide), "truncated" (cut off before that), "dead_end" (no token
            was legal, or the engine failed), "unguided".
        text: the generated text, without the stop token.
        num_tokens: generated tokens that belong to it, the stop token included.
        error: the reason of a dead end.
        final: False while the last token is unknown.
        intervened: a budget kept the row from a token it might have chosen.
    """

    status: Literal["complete", "truncated", "dead_end", "unguided"]
    text: str | None
    num_tokens: int
    error: Exception | None = None
    final: bool = True
    intervened: bool = False


def read_results(
    output: Any, session: Session, compiled: Sequence[CompiledGrammar | None], num_guides: int | None
) -> list[RowResult]:
    """Return one result per row of what `generate` returned.

    Raises:
        ValueError: `output` is not what the session's call returned.
    """
    sequences = getattr(output, "sequences", output)
    if not isinstance(sequences, torch.Tensor) or sequences.dim() != 2:
        raise ValueError(f"results() takes what generate returned, got {type(output).__name__}")
    rows = sequences.tolist()
    prompts = {tuple(prompt) for prompt in session.prompt.tolist()}
    if num_guides is not None and len(rows) % num_guides:
        raise ValueError(f"the output has {len(rows)} rows, which cannot be shared out among {num_guides} guides")
    if any(tuple(row[: session.prompt_len]) not in prompts for row in rows):
        raise ValueError(
            "the output's prompts are not those of this processor's last call; call results() right after generate, "
            "with what it returned"
        )
    results = []
    for index, row in enumerate(rows):
        grammar = compiled[guide_of_row(index, len(rows), num_guides)]
        # rows of the call that have the same guide share their history of failures
        session_row = index * session.num_rows // len(rows)
        results.append(_read_row(row[session.prompt_len :], grammar, session, session_row, index))
    return results


def read_running_results(
    session: Session, compiled: Sequence[CompiledGrammar | None], num_guides: int | None
) -> list[RowResult]:
    """Return the state of each row before the last, unseen token."""
    results = []
    for row, tokens in enumerate(session.generated.tolist()):
        grammar = compiled[guide_of_row(row, session.num_rows, num_guides)]
        result = _read_row(tokens, grammar, session, row, row)
        result.final = False
        results.append(result)
    return results


def _read_row(
    tokens: list[int], grammar: CompiledGrammar | None, session: Session, session_row: int, index: int
) -> RowResult:
    vocabulary = session.vocabulary
    if grammar is None:
        count = _up_to_stop(tokens, vocabulary)
        return RowResult("unguided", text_of(vocabulary, _without_stop(tokens[:count], vocabulary)), count)
    skipped = 1 if tokens and tokens[0] in session.skipped_start else 0
    error: Exception | None = None
    try:
        matcher = grammar.create_matcher()
        accepted = 0
        for token in tokens[skipped:]:
            if not matcher.accept_token(token):
                break
            accepted += 1
        count = skipped + accepted
        complete = matcher.is_terminated() or matcher.is_accepting()
        if not complete:
            error = session.failure(session_row, tokens[:count]) or _dead_end(matcher, session, tokens[:count], index)
    except Exception as engine_error:  # engines fail in ways of their own; only this row is lost
        complete, error = False, engine_error
        count = _up_to_stop(tokens, vocabulary)
    text = text_of(vocabulary, _without_stop(tokens[:count], vocabulary))
    intervened = session.intervened(session_row, tokens[:count])
    if complete:
        return RowResult("complete", text, count, intervened=intervened)
    return RowResult("truncated" if error is None else "dead_end", text, count, error, intervened=intervened)


def _dead_end(matcher: GrammarMatcher, session: Session, tokens: list[int], index: int) -> DeadEndError | None:
    """Tell whether the row stopped because nothing was legal."""
    bitmask = allocate_token_bitmask(1, session.vocabulary.vocab_size)
    matcher.fill_next_token_bitmask(bitmask, 0)
    if row_has_valid_token(bitmask[0], session.width):
        return None
    return dead_end_error(len(tokens), text_of(session.vocabulary, tokens), row=index)


def _up_to_stop(tokens: list[int], vocabulary: Vocabulary) -> int:
    for position, token in enumerate(tokens):
        if token in vocabulary.stop_token_set:
            return position + 1
    return len(tokens)


def _without_stop(tokens: list[int], vocabulary: Vocabulary) -> list[int]:
    return tokens[:-1] if tokens and tokens[-1] in vocabulary.stop_token_set else tokens
