"""GuidedLogitsProcessor: `model.generate(..., logits_processor=[p])` obeys a guide in every mode.

In:  the ids and scores of each call.      Out: new scores, banned columns at -inf; `scores` is never written.
Kept here: an unguided row's scores leave bit-identical; a guided row always keeps a finite score, also where something
before the guide banned every legal token (a broken model's NaN stays NaN: the sampler is to see it); scores of another
vocabulary's width pass through untouched.
Source: transformers 5.24, generation/utils.py and candidate_generator.py.
"""

import copy
import logging
import threading
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
from transformers import LogitsProcessor

from gd_plugin.config import GuidedDecodingConfig, checked_config
from gd_plugin.grammars.backends.registry import CompiledGrammar
from gd_plugin.grammars.budgets import check_budget
from gd_plugin.grammars.compiler import shared_factory
from gd_plugin.grammars.vocabulary import Vocabulary
from gd_plugin.guides.guide import Guide
from gd_plugin.hf.budget import Budget
from gd_plugin.hf.model_facts import ban_options_text, forced_start_possible, generation_stop_ids, resolve_vocabulary
from gd_plugin.hf.overlap import OverlappedStep
from gd_plugin.hf.reporting import read_report
from gd_plugin.hf.results import RowResult, read_results, read_running_results
from gd_plugin.hf.session import Session, StepRows, guide_of_row
from gd_plugin.hf.warning import warn_user
from gd_plugin.masks.apply import apply_token_bitmask_, open_banned_rows_
from gd_plugin.masks.arguments import MaskArguments
from gd_plugin.masks.bitmask import legal_columns
from gd_plugin.masks.cpu import apply_token_bitmask_cpu
from gd_plugin.masks.device import open_device
from gd_plugin.masks.outputs import OutputBuffers
from gd_plugin.reports.clock import StepClock
from gd_plugin.reports.recorder import Recorder
from gd_plugin.reports.report import Report

__all__ = ["GuidedLogitsProcessor"]

_log = logging.getLogger(__name__)

# running calls that are told apart when their steps come in turns (several loops or threads with one `[p]`)
_MAX_SESSIONS: Final = 16
_ID_DTYPES: Final = frozenset({torch.int64, torch.int32})
_SCORE_DTYPES: Final = frozenset({torch.float32, torch.float16, torch.bfloat16, torch.float64})
_BFLOAT16_MINUS_INF: Final = int(torch.tensor(float("-inf"), dtype=torch.bfloat16).view(torch.int16))


class GuidedLogitsProcessor(LogitsProcessor):  # type: ignore[misc]
    """Make `generate` obey one guide, or one guide per prompt.

    Pass it as `logits_processor=p`, which is always a fresh call, or as `logits_processor=[p]`, which recognises a new
    call by its ids. One processor serves any number of calls; the steps of up to 16 calls may come in turns, also from
    several threads. With `[p]`, ids that are a known call's and one token more are that call's next step: where a prompt
    may go on from another one like that, pass `logits_processor=p` or call `reset()`.

    Args:
        guide: one guide for every row, or a sequence with one guide per prompt; None is unguided.
        tokenizer: the model's tokenizer; not needed with `vocabulary`.
        model: the model, for its stop tokens, its width and its generation config. Recommended.
        vocabulary: a ready Vocabulary instead of a tokenizer.
        vocab_size: columns of the model's logits, if neither `model` nor the tokenizer tells.
        stop_token_ids: further ids that end a row. Ids given to `generate(eos_token_id=...)` belong here too.
        max_new_tokens: tokens a row may generate, its stop token included: every guided row is complete within them.
            Pass `generate` at least as many. Of the legal tokens of a step the 64 best are tried, the others are banned.
        report: record every step for `report()`. Costs milliseconds a row and step; docs/reports.md has figures.
        config: settings; None is the defaults.
        config_fields: single settings, for example `backend="xgrammar"`; win over `config`.

    Attributes:
        compiled: the compiled guides in the order given, None for unguided ones.
        vocabulary: the vocabulary in use.
        config: the settings in use.

    Raises:
        TypeError: something that is not a guide, an unknown option, or a `config` of another class.
        ValueError: an empty list of guides, or a setting that is not allowed.
        VocabularyError: no tokenizer, or one that does not fit the model.
        GuideError: a guide that is wrong or that no allowed backend can enforce.
        BackendNotInstalledError: the backend's engine is missing.
    """

    def __init__(
        self,
        guide: Guide | Sequence[Guide | None] | None,
        *,
        tokenizer: Any = None,
        model: Any = None,
        vocabulary: Vocabulary | None = None,
        vocab_size: int | None = None,
        stop_token_ids: Sequence[int] | int | None = None,
        max_new_tokens: int | None = None,
        report: bool = False,
        config: GuidedDecodingConfig | None = None,
        **config_fields: Any,
    ) -> None:
        if max_new_tokens is not None:
            check_budget(max_new_tokens)
        self._max_new_tokens = max_new_tokens
        self._reports = report
        guides = _checked_guides(guide)
        config = checked_config(config)
        self.config = config.replace_fields(**config_fields) if config_fields else config
        self.vocabulary = resolve_vocabulary(tokenizer, model, vocabulary, vocab_size, stop_token_ids)
        self.compiled: list[CompiledGrammar | None] = self._compile(guides)
        self._num_guides = None if guide is None or isinstance(guide, Guide) else len(guides)
        # logits of any other width belong to another vocabulary; unknown without a model
        self._model_width = self.vocabulary.vocab_size if model is not None else None
        self._forced_start_possible = forced_start_possible(model)
        self._finish_ids = generation_stop_ids(model, self.vocabulary)
        self._ban_options = ban_options_text(model)
        self._root = self
        self._last_called: GuidedLogitsProcessor = self
        self._one_call = False
        self._clear()

    def _compile(self, guides: Sequence[Guide | None]) -> list[CompiledGrammar | None]:
        factory = shared_factory(self.vocabulary, self.config)
        return [None if guide is None else factory.compile(guide) for guide in guides]

    def _clear(self) -> None:
        self._lock = threading.Lock()
        # the last calls of each width with what holds them to their budget, the one used last in front
        self._sessions: dict[int, list[tuple[Session, Budget | None]]] = {}
        self._session: Session | None = None
        self._foreign_width: int | None = None
        self._banned_flags: torch.Tensor | None = None
        self._overlap: OverlappedStep | None = None
        self._last_shape: tuple[int, int] | None = None
        self._warned = False
        self._outputs = OutputBuffers()

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Return guided scores.

        Args:
            input_ids: int64 [B, L], prompt and generated tokens of each row.
            scores: [B, V] of any floating type; not written.

        Returns:
            A new tensor like `scores`, or `scores` itself where nothing is guided.

        Raises:
            TypeError: something else than tensors of these types.
            ValueError: tensors of another shape; at a call's first step, guides and rows do not fit each other, or
                `max_new_tokens` is below the shortest completion known for a row's guide; the message has the number.
            DeadEndError: a row has no legal token, with `on_dead_end="raise"` only.
        """
        _check_step(input_ids, scores)
        with self._lock:  # steps of several threads come one by one
            return self._step(input_ids, scores)

    def _step(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        width = scores.shape[-1]
        if self._model_width is not None and width != self._model_width:
            # `results` asks the processor that was passed, not the fresh one that generate was given
            if self._foreign_width != width:
                _log.info("scores of %d columns pass through: the model has %s", width, self._model_width)
            self._foreign_width = self._root._foreign_width = width
            return scores
        self._root._last_called = self
        clock = StepClock(scores.device) if self._reports else None
        ids = self._fetch(input_ids)
        found = self._find(width, ids)
        next_step = found is not None and found[0].is_next_step(ids)
        if found is None:
            session = Session(
                self.compiled,
                self._num_guides,
                ids,
                self.vocabulary,
                width,
                self._finish_ids,
                self._forced_start(scores),
            )
            session.recorder = self._new_recorder()
            found = session, self._new_budget(len(ids))
            self._warned = False
            _log.debug("a new call: %d rows, %d tokens of prompt, %d columns", *ids.shape, width)
        session, budget = found
        others = [other for other in self._sessions.get(width, ()) if other is not found]
        self._sessions[width] = [found, *others[: _MAX_SESSIONS - 1]]
        self._session = session
        session.follow(ids, next_step=next_step)
        rows = session.mask_rows(release=self.config.on_dead_end == "release")
        if self.config.on_dead_end == "raise" and (dead := session.dead_end()) is not None:
            raise dead[1]
        if ids.shape[1] == session.prompt_len and session.skipped_start:
            rows.row_index[:] = -1  # the model is made to begin with a token that is no part of the text
        if clock is not None:
            clock.lap("build")
        if not (rows.row_index >= 0).any():
            return self._recorded(session, rows, ids, scores, scores, clock)
        if scores.stride(-1) != 1 or scores.stride(0) < scores.shape[1]:
            # columns apart, or rows that overlap because they were expanded from one
            scores = scores.contiguous()
        if clock is not None:
            clock.device_lap(None)
        if self._overlap is not None:
            out = self._overlap.apply(input_ids, ids, session.pool.bitmask, rows.row_index, scores)
        else:
            out = self._apply(session, rows, scores, clock)
        if clock is not None:
            clock.device_lap("apply")
        if budget is not None:
            out = budget.apply(session, rows, out)
            if clock is not None:
                clock.lap("build")
        return self._recorded(session, rows, ids, scores, out, clock)

    def __len__(self) -> int:
        """One processor: `generate` asks for the length of what it is given."""
        return 1

    def __iter__(self) -> "Iterator[GuidedLogitsProcessor]":
        """Yield a fresh processor for one call; it shares the compiled guides, and `results` follows it."""
        child = object.__new__(type(self))
        child.__dict__.update(self.__dict__)
        child._one_call = True
        child._clear()
        yield child

    def __deepcopy__(self, memo: object) -> "GuidedLogitsProcessor":
        # all that a processor keeps between calls is immutable, or a tokenizer that nobody writes to
        return copy.copy(self)

    def __getstate__(self) -> dict[str, Any]:
        """What a copy or a pickle holds: guides instead of engines' objects, and no running call."""
        [fresh] = self
        guides = [None if grammar is None else grammar.guide for grammar in self.compiled]
        return {
            **vars(fresh),
            "compiled": guides,
            "_root": None,
            "_last_called": None,
            "_one_call": False,
            "_lock": None,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Become a processor of its own; compiles what this process has not compiled yet."""
        self.__dict__.update(state)
        self._clear()
        self.compiled = self._compile(state["compiled"])
        self._root = self._last_called = self

    def reset(self) -> None:
        """Forget the running call, so that the next one starts anew even if its prompt continues the last output."""
        self._clear()
        self._root._last_called = self

    def results(self, output: Any = None) -> list[RowResult]:
        """Return what became of each row of the last call.

        Args:
            output: what `generate` returned, a tensor or a ModelOutput. Without it, the state before the last token,
                which the processor never sees, with `final=False`.

        Raises:
            ValueError: `output` is from none of this processor's last calls.
            RuntimeError: the processor has not been called yet, or only with scores of another width.
        """
        called = self._root._last_called
        session = called._session
        if session is None:
            if called._foreign_width is not None:
                raise RuntimeError(
                    f"nothing was guided: the scores had {called._foreign_width} columns, but the model given to this "
                    f"processor has {called._model_width}; pass the model that generates"
                )
            raise RuntimeError("nothing to report: this processor has not been called; pass it to generate first")
        if output is None:
            return read_running_results(session, self.compiled, self._num_guides)
        return read_results(output, called._session_of(output) or session, self.compiled, self._num_guides)

    def report(self, output: Any = None) -> Report:
        """Return what the guide did at each step of the last call; needs `report=True`.

        Args:
            output: what `generate` returned, a tensor or a ModelOutput. Without it, the report ends before the last
                token of each row, which the processor never sees.

        Raises:
            ValueError: `output` is from none of this processor's last calls.
            RuntimeError: the processor was made without `report=True`, or nothing has been recorded yet.
        """
        if not self._reports:
            raise RuntimeError("nothing was recorded: pass report=True to GuidedLogitsProcessor")
        results = self.results(output)
        called = self._root._last_called
        session = called._session_of(output)
        if session is None:
            raise RuntimeError("nothing was recorded: pass the processor to generate first")
        with called._lock:
            return read_report(output, session, results, self.compiled, self._num_guides)

    def for_row(self, row: int, num_rows: int) -> "GuidedLogitsProcessor":
        """Return a fresh processor for one row of a call with `num_rows` rows, whose rows are processed one by one."""
        (alone,) = self
        alone.compiled = [self.compiled[guide_of_row(row, num_rows, self._num_guides)]]
        alone._num_guides = None
        alone._root = alone
        return alone

    def follow_rows(self, prompt: torch.Tensor, rows: "Sequence[GuidedLogitsProcessor]") -> None:
        """Let `results` report on a call whose rows were processed one by one, by those that `for_row` returned.

        Args:
            prompt: int64 [B, L], the prompt of each row.
            rows: B processors, in order.
        """
        self._root._last_called = self
        self._session = Session(
            self.compiled,
            self._num_guides,
            prompt.cpu().numpy(),
            self.vocabulary,
            self.vocabulary.vocab_size,
            self._finish_ids,
        )
        self._session.recorder = self._new_recorder()
        for index, row in enumerate(rows):
            if row._session is not None:
                self._session.take_reports(index, row._session)
            if self._session.recorder is not None and row._session is not None and row._session.recorder is not None:
                self._session.recorder.take(index, len(rows), row._session.recorder)

    def _new_recorder(self) -> Recorder | None:
        if not self._reports:
            return None
        return Recorder(self.vocabulary, partial(guide_of_row, num_guides=self._num_guides))

    def _recorded(
        self,
        session: Session,
        rows: StepRows,
        ids: npt.NDArray[np.int64],
        scores: torch.Tensor,
        out: torch.Tensor,
        clock: StepClock | None,
    ) -> torch.Tensor:
        """Take the step down if a report was asked for, and return `out`."""
        if clock is None or session.recorder is None:
            return out
        open_rows, num_legal = session.open_rows(rows)
        session.recorder.record(ids, scores, out, open_rows, num_legal, clock)
        return out

    def check_budget(self, num_rows: int = 1) -> None:
        """Raise what the first step of a call with `num_rows` rows would raise about `max_new_tokens`.

        Raises:
            ValueError: it is below the shortest completion known of a row's guide; the message has the number.
        """
        budget = self._new_budget(num_rows)
        if budget is not None:
            budget.check()

    def _new_budget(self, num_rows: int) -> Budget | None:
        if self._max_new_tokens is None:
            return None
        guides = [self.compiled[guide_of_row(row, num_rows, self._num_guides)] for row in range(num_rows)]
        return Budget(self._max_new_tokens, self.vocabulary, guides, self.config)

    def _find(self, width: int, ids: npt.NDArray[np.int64]) -> tuple[Session, Budget | None] | None:
        """Return the running call that `ids` continue, or None for a new one."""
        known = self._sessions.get(width, [])
        for found in known:
            if found[0].is_next_step(ids):
                return found
        for place, found in enumerate(known):
            session = found[0]
            if self._one_call and ids.shape[0] == session.num_rows and ids.shape[1] >= session.prompt_len:
                # this object was made for one call, so only a changed prompt can make it another one
                if np.array_equal(ids[:, : session.prompt_len], session.prompt):
                    return found
                continue
            # the bare prompt again is another call, and behind older calls a token more is likelier another prompt
            if ids.shape[1] > session.prompt_len + (place > 0) and session.continues(ids):
                return found
        return None

    def _session_of(self, output: Any) -> Session | None:
        """Return the call that `output` came from, as far as it can be told; otherwise the last one."""
        sequences = getattr(output, "sequences", output)
        last = self._session
        if last is None or not isinstance(sequences, torch.Tensor) or sequences.dim() != 2:
            return last
        ids = sequences.cpu().numpy()
        sessions = [last, *(session for known in list(self._sessions.values()) for session, _ in known)]
        for session in sessions:
            if session.led_to(ids):
                return session
        # beams and drafts leave the last ids that were seen
        prompts = (
            s for s in sessions if {*map(tuple, ids[:, : s.prompt_len].tolist())} <= {*map(tuple, s.prompt.tolist())}
        )
        return next(prompts, last)

    def _fetch(self, input_ids: torch.Tensor) -> npt.NDArray[np.int64]:
        """Bring the ids to the host, with the last step's flags: one transfer a step."""
        if input_ids.device.type == "cpu":
            return input_ids.numpy()
        shape = (input_ids.shape[0], input_ids.shape[1])
        # a step that follows another one of the same loop; anything else is read in the stream's order
        follows, self._last_shape = self._last_shape == (shape[0], shape[1] - 1), shape
        if self.config.overlap and input_ids.device.type == "cuda":
            if self._overlap is None or not self._overlap.serves(input_ids):
                device = open_device(input_ids.device, self.config.pin_memory)
                self._overlap = OverlappedStep(device, shape[0], self.vocabulary.vocab_size)
            ids = self._overlap.fetch(input_ids, early=follows)
            if self._overlap.banned_rows():
                self._warn_banned()
            return ids
        flags, self._banned_flags = self._banned_flags, None
        if flags is None or flags.shape[0] != input_ids.shape[0]:
            return input_ids.cpu().numpy()
        fetched = torch.cat([input_ids, flags[:, None].to(input_ids.dtype)], dim=1).cpu().numpy()
        if fetched[:, -1].any():
            self._warn_banned()
        return fetched[:, :-1]

    def _forced_start(self, scores: torch.Tensor) -> frozenset[int]:
        """Return the special token that every row is made to begin with (forced_bos_token_id), if there is one."""
        if not self._forced_start_possible or not scores.shape[0]:
            return frozenset()
        finite = scores > float("-inf")
        if not bool((finite.sum(dim=-1) == 1).all()):
            return frozenset()
        forced = frozenset(finite.int().argmax(dim=-1).tolist())
        special = self.vocabulary.special_token_ids - self.vocabulary.stop_token_set
        return forced if forced <= special else frozenset()

    def _apply(self, session: Session, rows: StepRows, scores: torch.Tensor, clock: StepClock | None) -> torch.Tensor:
        if scores.device.type == "cpu":
            out = self._outputs.empty_like(scores)
            if out.numel():
                row_index = torch.from_numpy(rows.row_index)
                # what apply_token_bitmask_ would check is so by construction
                arguments = MaskArguments(session.pool.bitmask, None, None, row_index, 0, self.vocabulary.vocab_size)
                apply_token_bitmask_cpu(scores, arguments, out)
                self._mend_rows(session, rows, out)
            return out
        out = torch.empty_like(scores, memory_format=torch.contiguous_format)
        return self._apply_on_device(session, rows, scores, out, clock)

    def _mend_rows(self, session: Session, rows: StepRows, out: torch.Tensor) -> None:
        """Where something before the guide banned every legal token, let all of them through alike."""
        values: npt.NDArray[Any]
        minus_inf: float
        if out.dtype == torch.bfloat16:  # numpy has no such type: compare its bits
            values, minus_inf = out.view(torch.int16).numpy(), _BFLOAT16_MINUS_INF
        else:
            values, minus_inf = out.numpy(), float("-inf")
        for row, (index, column) in enumerate(zip(rows.row_index.tolist(), rows.first_legal.tolist(), strict=True)):
            # a legal token with a finite score proves a row sound; the others are looked at as a whole
            if index < 0 or values[row, column] != minus_inf:
                continue
            if out[row].max() > float("-inf") or out[row].isnan().any():
                continue
            legal = legal_columns(session.pool.bitmask[rows.row_index[row]], out.shape[1])
            out[row, torch.from_numpy(legal)] = 0.0
            node = session.nodes[row]
            if node is not None and node.state.value == "live":
                self._warn_banned()

    def _apply_on_device(
        self, session: Session, rows: StepRows, scores: torch.Tensor, out: torch.Tensor, clock: StepClock | None
    ) -> torch.Tensor:
        """Upload the rows in use and apply them, without waiting for the device."""
        used, compact = np.unique(rows.row_index, return_inverse=True)
        if used[0] == -1:
            used, compact = used[1:], compact - 1
        device = scores.device
        bitmask = session.pool.bitmask[torch.from_numpy(used.astype(np.int64))].to(device, non_blocking=True)
        row_index = torch.from_numpy(compact.astype(np.int32)).to(device, non_blocking=True)
        if clock is not None:
            clock.device_lap("copy")
        arguments: dict[str, Any] = {"row_index": row_index, "vocab_size": self.vocabulary.vocab_size}
        apply_token_bitmask_(scores, bitmask, out=out, **arguments)
        self._banned_flags = open_banned_rows_(out, bitmask, row_index >= 0, **arguments)
        return out

    def _warn_banned(self) -> None:
        if not self._warned:
            self._warned = True
            warn_user(
                "something before the guide banned every token the guide allows; the guide wins, and all of them are "
                f"equally likely at that step. {self._ban_options}"
            )


def _check_step(input_ids: torch.Tensor, scores: torch.Tensor) -> None:
    """Check what a step is called with, by attributes alone: the device is not waited for."""
    expected = "expected input_ids int64 [rows, tokens] and scores float [rows, columns]"
    for name, tensor, dtypes in (("input_ids", input_ids, _ID_DTYPES), ("scores", scores, _SCORE_DTYPES)):
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"{name} must be a tensor, got {type(tensor).__name__}; {expected}")
        if tensor.dtype not in dtypes:
            raise TypeError(f"{name} are {tensor.dtype}; {expected}")
        if tensor.ndim != 2:
            raise ValueError(f"{name} have shape {list(tensor.shape)}; {expected}")
    if input_ids.shape[0] != scores.shape[0]:
        raise ValueError(f"input_ids have {input_ids.shape[0]} rows but scores have {scores.shape[0]}; {expected}")


def _checked_guides(guide: object) -> list[Guide | None]:
    advice = "use gd.Guide.json_schema(...), .regex(...), .choice(...) and so on"
    if guide is None or isinstance(guide, Guide):
        return [guide]
    if isinstance(guide, str | bytes | dict) or not isinstance(guide, Sequence):
        raise TypeError(f"guide must be a Guide, None or a list of them, got {type(guide).__name__}; {advice}")
    if not guide:
        raise ValueError("the list of guides is empty; pass one guide per prompt, None for an unguided one")
    for index, item in enumerate(guide):
        if item is not None and not isinstance(item, Guide):
            raise TypeError(f"guide {index} must be a Guide or None, got {type(item).__name__}; {advice}")
    return list(guide)
