"""Recorder: what a processor sees of one call of `generate`, kept until somebody asks for a report.

In:  at each call of the processor the ids, and the scores before and after.      Out: a Report.
Kept here: a step is found by its row's token history and never by the row's index, so beams may reorder rows and drafts
may be taken back: a row of the report is what `generate` returned, read token by token. What a token was worth is known
once it is seen in a later call, or in the output; the scores are kept until then, within a limit.
"""

import hashlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch

from gd_plugin.grammars.vocabulary import Vocabulary
from gd_plugin.reports.clock import StepClock
from gd_plugin.reports.measure import Figures, measure_chosen, measure_step
from gd_plugin.reports.report import Alternative, CallTimes, Report, RowReport, StepReport

__all__ = ["Recorder", "RowFacts"]

Ids = npt.NDArray[np.int64]
_Key = tuple[int, bytes]

# alternatives of each kind that are kept a step
_NUM_ALTERNATIVES: Final = 5
# calls whose scores are kept for tokens yet to be seen (the longest draft), and bytes of them
_MAX_PENDING: Final = 64
_MAX_PENDING_BYTES: Final = 64 << 20
# steps of all rows that one report holds: 2 to 3 KB each where every call has one row
_MAX_STEPS: Final = 50_000
# rows measured at a time: some float copies of [rows, V] are alive meanwhile
_CHUNK: Final = 16


@dataclass(frozen=True, slots=True)
class RowFacts:
    """What is known of a row of the output beside its steps; the fields are those of `RowReport`."""

    status: str
    text: str
    guide: str | None
    backend: str | None
    reason: str | None


class _Call:
    """One call of the processor; `before` is dropped once it is not needed any more."""

    def __init__(
        self,
        ids: Ids,
        groups: list[int],
        before: torch.Tensor,
        figures: list[Figures],
        num_legal: list[int | None],
        clock: StepClock,
    ) -> None:
        self.ids: Ids | None = ids
        self.groups = np.array(groups)
        self.length = ids.shape[1]
        self.num_rows = ids.shape[0]
        self.before: torch.Tensor | None = before
        self.figures = figures
        self.num_legal = num_legal
        self.clock = clock
        self.record = 0.0
        # (row, token) -> (log probability, rank), as they are found
        self.chosen: dict[tuple[int, int], tuple[float, int]] = {}
        self._found: list[tuple[list[tuple[int, int]], torch.Tensor, torch.Tensor]] = []
        self._host: dict[str, npt.NDArray[Any]] | None = None

    def look_up(self, pairs: list[tuple[int, int]]) -> None:
        """Find what these (row, token) are worth; nothing waits for the device."""
        if self.before is None or not pairs:
            return
        rows = torch.tensor([row for row, _ in pairs], device=self.before.device)
        tokens = torch.tensor([token for _, token in pairs], device=self.before.device)
        highest = torch.cat([figures.highest for figures in self.figures])[rows]
        log_sum = torch.cat([figures.log_sum for figures in self.figures])[rows]
        for start in range(0, len(pairs), _CHUNK):
            part = slice(start, start + _CHUNK)
            found = measure_chosen(self.before[rows[part]], highest[part], log_sum[part], tokens[part])
            self._found.append((pairs[part], found.log_probability, found.rank))
        # asked for once
        self.chosen.update(dict.fromkeys(pairs, (float("nan"), 0)))

    def drop_scores(self) -> None:
        self.before = self.ids = None

    def host(self) -> dict[str, npt.NDArray[Any]]:
        """Return the figures on the host; waits for the device the first time."""
        if self._host is None:
            names = [name for name in Figures._fields if name != "stops"]
            self._host = {
                name: torch.cat([getattr(figures, name) for figures in self.figures]).cpu().numpy() for name in names
            }
            for name in ("log_probability", "rank"):
                self._host[name] = torch.cat([getattr(f.stops, name) for f in self.figures]).cpu().numpy()
            if self.before is None:
                self.figures = []
        for pairs, logs, ranks in self._found:
            self.chosen.update(zip(pairs, zip(logs.tolist(), ranks.tolist(), strict=True), strict=True))
        self._found = []
        return self._host


class Recorder:
    """Records one call of `generate`. Not thread-safe: the processor calls it under its lock.

    Args:
        vocabulary: the processor's.
        guide_of_row: row, number of rows -> which of the processor's guides the row has.
    """

    def __init__(self, vocabulary: Vocabulary, guide_of_row: Callable[[int, int], int]) -> None:
        self._vocabulary = vocabulary
        self._guide_of_row = guide_of_row
        self._calls: list[_Call] = []
        self._pending: list[_Call] = []
        self._places: dict[_Key, tuple[int, int]] = {}
        self._num_not_kept = 0
        # for each row the first one of those that were expanded from the same prompt (beams, return sequences)
        self._groups: list[int] = []
        self._names = {token_id: name for name, token_id in vocabulary.special_token_names.items()}

    def record(
        self,
        ids: Ids,
        before: torch.Tensor,
        after: torch.Tensor,
        rows: Sequence[int],
        num_legal: Sequence[int | None],
        clock: StepClock,
    ) -> None:
        """Take down one call.

        Args:
            ids: int64 [B, L] on the host.
            before: [B, V], scores as they came.
            after: [B, V], scores as they leave.
            rows: those that are not finished.
            num_legal: tokens that the guide allows, for each of `rows`; None where it is unguided.
            clock: of this call, its laps done.
        """
        start = time.perf_counter()
        if not self._groups:
            self._groups = self._find_groups(ids, before)
        self._see(ids)
        if len(self._places) + len(rows) > _MAX_STEPS:
            self._num_not_kept += len(rows)
            self._drop_pending(0)
            return
        # rows of the same history are one step
        keys: dict[_Key, int] = {}
        for place, row in enumerate(rows):
            keys.setdefault(self._key(row, ids[row]), place)
        rows = [rows[place] for place in keys.values()]
        num_legal = [num_legal[place] for place in keys.values()]
        if rows:
            index = torch.tensor(list(rows), device=before.device)
            # a copy: what comes next may write into the scores
            kept = before[index].to(torch.float64 if before.dtype == torch.float64 else torch.float32, copy=True)
            stop_ids = torch.tensor(
                [i for i in self._vocabulary.stop_token_ids if i < before.shape[1]],
                dtype=torch.int64,
                device=before.device,
            )
            count = min(_NUM_ALTERNATIVES, before.shape[1])
            figures = [
                measure_step(kept[i : i + _CHUNK], after[index[i : i + _CHUNK]], stop_ids, count)
                for i in range(0, len(rows), _CHUNK)
            ]
            call = _Call(ids[rows].copy(), [self._groups[row] for row in rows], kept, figures, num_legal, clock)
            for place, key in enumerate(keys):
                # where a draft model is guided too, the model that checks its draft comes later
                self._places[key] = len(self._calls), place
            self._calls.append(call)
            self._pending.append(call)
            self._drop_pending(_MAX_PENDING_BYTES)
            if len(self._calls) % _MAX_PENDING == 0:
                for old in self._calls[-2 * _MAX_PENDING : -_MAX_PENDING]:
                    old.host()
            call.record = time.perf_counter() - start
        clock.stop()

    def take(self, row: int, num_rows: int, alone: "Recorder") -> None:
        """Take over what another recorder saw of one row that was processed alone."""
        self._groups = list(range(num_rows))
        shift = len(self._calls)
        self._calls.extend(alone._calls)
        for call in alone._calls:
            call.groups[:] = row
        self._pending.extend(alone._pending)
        for (_, digest), (index, place) in alone._places.items():
            self._places[row, digest] = index + shift, place
        self._num_not_kept += alone._num_not_kept

    def report(self, sequences: Ids, prompt_len: int, facts: Sequence[RowFacts], *, final: bool) -> Report:
        """Return the report of these rows.

        Args:
            sequences: int64 [R, L], what `generate` returned, prompts included.
            prompt_len: tokens of the prompts.
            facts: one for each row.
            final: whether `sequences` hold each row's last token.
        """
        self._groups = self._groups or list(range(len(sequences)))
        # rows of one prompt lie together, in the calls as in the output
        places = [row * len(self._groups) // len(sequences) for row in range(len(sequences))]
        self._see(sequences, places)
        rows = []
        for row, (ids, fact) in enumerate(zip(sequences, facts, strict=True)):
            steps = tuple(self._step(ids, end, prompt_len, places[row]) for end in self._ends(ids, prompt_len))
            rows.append(RowReport(row, fact.guide, fact.backend, fact.reason, fact.status, fact.text, steps))
        return Report(
            final=final,
            vocab_size=self._vocabulary.vocab_size,
            rows=tuple(rows),
            calls=self._times(),
            num_not_kept=self._num_not_kept,
            versions=_versions(),
        )

    def _find_groups(self, ids: Ids, before: torch.Tensor) -> list[int]:
        """Tell which rows were expanded from one prompt: neighbours with the same guide, ids and scores.

        The ids alone do not tell: an encoder's input, or embeddings, are not among them.
        """
        groups = [0]
        for row in range(1, len(ids)):
            alike = (
                self._guide_of_row(row, len(ids)) == self._guide_of_row(row - 1, len(ids))
                and np.array_equal(ids[row], ids[row - 1])
                and torch.allclose(before[row], before[row - 1], rtol=1e-3, atol=1e-3, equal_nan=True)
            )
            groups.append(groups[-1] if alike else row)
        return groups

    def _see(self, ids: Ids, places: Sequence[int] | None = None) -> None:
        """Find which tokens of the calls whose scores are kept have been chosen, now that these rows are known."""
        groups = np.array([self._groups[place] for place in (range(len(ids)) if places is None else places)])
        for call in reversed(self._pending):
            if call.ids is None or call.before is None or ids.shape[1] <= call.length:
                continue
            pairs: dict[tuple[int, int], None] = {}
            num_found = 0
            for row, head in enumerate(ids[:, : call.length]):
                matches = np.flatnonzero((call.ids == head).all(axis=1) & (call.groups == groups[row]))
                num_found += bool(len(matches))
                pairs.update(((int(place), int(ids[row, call.length])), None) for place in matches)
            width = call.before.shape[1]
            call.look_up([pair for pair in pairs if pair not in call.chosen and 0 <= pair[1] < width])
            if places is None and num_found == len(ids) and ids.shape[1] == call.length + 1:
                # each row is a token longer: what came before has been seen before
                break

    def _drop_pending(self, limit: int) -> None:
        """Let go of the oldest scores, past these bytes or the most calls; a draft may still come back to the others."""
        sizes = [0 if c.before is None else c.before.numel() * c.before.element_size() for c in self._pending]
        while len(self._pending) > 1 and (sum(sizes) > limit or len(self._pending) > _MAX_PENDING):
            self._pending.pop(0).drop_scores()
            sizes.pop(0)

    def _key(self, row: int, ids: Ids) -> _Key:
        return self._groups[row], hashlib.blake2b(ids.tobytes(), digest_size=16).digest()

    def _ends(self, ids: Ids, prompt_len: int) -> range:
        """The places of a row's generated tokens, up to its stop token."""
        for place in range(prompt_len, len(ids)):
            if int(ids[place]) in self._vocabulary.stop_token_set:
                return range(prompt_len, place + 1)
        return range(prompt_len, len(ids))

    def _step(self, ids: Ids, end: int, prompt_len: int, row: int) -> StepReport:
        token_id = int(ids[end])
        text, special = self._text(token_id)
        found = self._places.get(self._key(row, ids[:end]))
        if found is None:
            return StepReport(end - prompt_len, token_id, text, special, scored=False)
        index, place = found
        call = self._calls[index]
        host = call.host()
        log_probability, rank = call.chosen.get((place, token_id), (float("nan"), 0))
        stops = self._vocabulary.stop_token_ids
        if not rank and token_id in stops and stops.index(token_id) < host["rank"].shape[1]:
            at = stops.index(token_id)
            log_probability, rank = float(host["log_probability"][place, at]), int(host["rank"][place, at])
        num_allowed = int(host["num_allowed"][place])
        log_kept = float(host["log_kept"][place])
        # where something before the guide had banned all that is legal, the processor lets all of it through alike
        after = float(np.exp(log_probability - log_kept)) if np.isfinite(log_kept) else 1.0 / max(1, num_allowed)
        banned, allowed = host["banned"][place], host["allowed"][place]
        return StepReport(
            position=end - prompt_len,
            token_id=token_id,
            text=text,
            special=special,
            scored=True,
            call=index,
            num_legal=call.num_legal[place],
            num_allowed=num_allowed,
            removed_mass=_number(host["removed_mass"][place]),
            probability=_number(np.exp(log_probability)) if rank else None,
            probability_after=_number(min(1.0, after)) if rank else None,
            rank=rank or None,
            entropy_before=_number(host["entropy_before"][place]),
            entropy_after=_number(host["entropy_after"][place]),
            overruled=bool(host["overruled"][place]),
            banned=self._alternatives(host["banned_ids"][place], banned),
            allowed=self._alternatives(host["allowed_ids"][place], allowed),
        )

    def _alternatives(self, ids: npt.NDArray[Any], probabilities: npt.NDArray[Any]) -> tuple[Alternative, ...]:
        return tuple(
            Alternative(int(token_id), self._text(int(token_id))[0], float(probability))
            for token_id, probability in zip(ids, probabilities, strict=True)
            if probability >= 0
        )

    def _text(self, token_id: int) -> tuple[str, bool]:
        tokens = self._vocabulary.tokens
        data = tokens[token_id] if 0 <= token_id < len(tokens) else b""
        if data and token_id not in self._vocabulary.stop_token_set:
            return data.decode(errors="backslashreplace"), False
        return self._names.get(token_id, f"<token {token_id}>"), True

    def _times(self) -> tuple[CallTimes, ...]:
        first = min((call.clock.start for call in self._calls), default=0.0)
        # rows that were processed one by one lie one behind the other here, but took turns
        gaps: dict[int, float | None] = {}
        last_end: float | None = None
        for index in sorted(range(len(self._calls)), key=lambda index: self._calls[index].clock.start):
            clock = self._calls[index].clock
            gaps[index] = None if last_end is None else max(0.0, clock.start - last_end)
            last_end = clock.end
        return tuple(
            CallTimes(
                start=call.clock.start - first,
                length=call.length,
                num_rows=call.num_rows,
                model=gaps[index],
                build=call.clock.seconds("build") or 0.0,
                copy=call.clock.seconds("copy"),
                apply=call.clock.seconds("apply") or 0.0,
                record=call.record,
            )
            for index, call in enumerate(self._calls)
        )


def _number(value: Any) -> float | None:
    number = float(value)
    return number if np.isfinite(number) else None


def _versions() -> dict[str, str]:
    import transformers

    from gd_plugin.version import __version__

    return {"gd_plugin": __version__, "torch": torch.__version__, "transformers": transformers.__version__}
