"""What runs in host functions: the callback's copy of the batch, handed over by a queue, and the grammar work on it.

In:  batches that the caller has put into the queue; calls on a thread of the driver, one at a time, in stream order.
Out: rows in the staging buffer, slots brought up to date, failures in a deque.

A replayed graph calls the same functions again, whatever the caller has done in between, so each of them first finds out
what there is to do: a batch is built once, a draft step once and in its turn, and a rollback settles what is unsettled.
A call that finds nothing new leaves the rows if they are those of its own step, and switches all of them off if not.

The caller runs ahead, so the head of the queue may belong to a replay that is still to come. Each batch therefore has a
ticket, which the main stream copies to `announced` ahead of the batch's step: only what is announced is fetched.
"""

import weakref
from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial
from typing import Final

import numpy as np
import numpy.typing as npt

from gd_plugin.decoding.building import BatchBuilder, Failures
from gd_plugin.decoding.precompiled import PreparedAttaching
from gd_plugin.decoding.requests import GuidedRequests
from gd_plugin.decoding.speculation import describe
from gd_plugin.decoding.tokens import Step, TokenBuffers
from gd_plugin.errors import GuidedDecodingError
from gd_plugin.grammars.matcher import GrammarMatcher
from gd_plugin.masks.buffers import HostRows

__all__ = ["NUM_TICKETS", "StepCallbacks"]

DraftWords = npt.NDArray[np.int32] | None

# far more than steps can be under way
NUM_TICKETS: Final = 1024


@dataclass(eq=False, slots=True)
class _Handover:
    """A step on its way to the callback, with the matchers of the requests that start in it."""

    step: Step
    matchers: dict[int, GrammarMatcher]
    ticket: int


class StepCallbacks:
    """The callback's side of a decoder.

    Args:
        build_step: builds a step whose tokens have arrived, into the staging buffer.
        builder: does rollbacks and arrivals.
        tokens: tokens that come from the device.
        host: the staging buffer.
        attaching: takes the matchers of a batch.
        announced: one word of host memory, the ticket of the step that the main stream has come to.
    """

    def __init__(
        self,
        build_step: Callable[[Step, DraftWords], Failures],
        builder: BatchBuilder,
        tokens: TokenBuffers,
        host: HostRows,
        attaching: PreparedAttaching,
        announced: npt.NDArray[np.int32],
    ) -> None:
        self._build_step = build_step
        self._builder = builder
        self._tokens = tokens
        self._host = host
        self._attaching = attaching
        self._announced = announced
        # memory begins as zeros, which no ticket may be taken for
        self._last_ticket = 0
        self._queue: deque[_Handover] = deque()
        self._failures: deque[tuple[object, str]] = deque()
        # the target step at hand, and the next step of its draft loop
        self._running: Step | None = None
        self._running_ticket = 0
        self._next_draft_step = 0
        # what the staging buffer shows: (target step, draft step), and how many rows of it
        self._shown: tuple[Step, int | None] | None = None
        self._num_shown = 0

    # on the caller's thread ------------------------------------------------------------------------------------------

    def put(self, step: Step, matchers: dict[int, GrammarMatcher]) -> int:
        """Hand a step over; return the ticket to be announced ahead of the host function that fetches it."""
        self._last_ticket = (self._last_ticket + 1) % NUM_TICKETS
        self._queue.append(_Handover(step, matchers, self._last_ticket))
        return self._last_ticket

    def withdraw(self, step: Step) -> None:
        """Take a step back that no host function is going to fetch."""
        if self._queue and self._queue[-1].step is step:
            self._queue.pop()

    @property
    def has_failures(self) -> bool:
        """Whether there is anything to take."""
        return bool(self._failures)

    def take_failures(self, synchronized: Collection[object], active: Collection[object] | None) -> Failures:
        """Return failures of `synchronized` ids and of whole batches; keep those of other ids that are `active`."""
        taken: Failures = []
        for _ in range(len(self._failures)):
            request_id, message = self._failures.popleft()
            if request_id is None or request_id in synchronized:
                taken.append((request_id, message))
            elif active is None or request_id in active:
                self._failures.append((request_id, message))
        return taken

    # on the driver's thread ------------------------------------------------------------------------------------------

    def build_target(self, num_rows: int, draft_words: DraftWords) -> None:
        """Fetch, attach and build the next step, if there is one.

        Args:
            num_rows: rows that are copied and applied behind this call.
            draft_words: see `RowWriter.begin`.
        """
        handover = self._fetch()
        if handover is None:
            self._repeat(self._current(), None, num_rows)
            return
        self._running, self._running_ticket, self._next_draft_step = handover.step, handover.ticket, 0
        self._attaching.matchers = handover.matchers
        self._build(handover.step, num_rows, draft_words)

    def build_draft(self, draft_step: int, num_rows: int, draft_words: DraftWords) -> None:
        """Build one step of the draft loop of the step at hand, if it is its turn."""
        running = self._current()
        if running is None or draft_step != self._next_draft_step:
            self._repeat(running, draft_step, num_rows)
            return
        target = running.target
        if draft_step >= target.max_num_draft_tokens:
            # captured for a longer loop than this step has
            self._repeat(None, draft_step, num_rows)
            return
        self._next_draft_step += 1
        drafts = GuidedRequests([request.as_draft() for request in target.requests], target.max_num_draft_tokens)
        self._build(Step(drafts, target, draft_step=draft_step), num_rows, draft_words)

    def _build(self, step: Step, num_rows: int, draft_words: DraftWords) -> None:
        running, self._shown = self._running, None
        if step.requests.num_bitmask_tokens > num_rows:
            raise GuidedDecodingError(
                f"the batch needs {step.requests.num_bitmask_tokens} rows but the graph was captured for {num_rows}; "
                "replay a graph that was captured for at least as many requests and drafts"
            )
        self._host.switches[:num_rows] = 0
        self._failures.extend(self._build_step(step, draft_words))
        if running is not None:
            self._shown, self._num_shown = (running, step.draft_step), step.requests.num_bitmask_tokens

    def _repeat(self, running: Step | None, draft_step: int | None, num_rows: int) -> None:
        """There is nothing to build: keep the rows if they are this step's own."""
        is_own = self._shown is not None and self._shown[0] is running and self._shown[1] == draft_step
        self._host.switches[self._num_shown if is_own else 0 : num_rows] = 0

    def rollback_batch(self, num_nodes: int | None) -> None:
        """Undo what the target rejected in the step at hand, by the numbers that have arrived.

        Args:
            num_nodes: accepted nodes of draft trees there are for each request; None is none.
        """
        running = self._current()
        if running is None:
            return
        target = running.target
        num_emitted = self._tokens.num_emitted(len(target))
        paths = None if num_nodes is None else self._tokens.accepted_nodes(len(target), num_nodes)
        self._failures.extend(self._builder.rollback_rejected(target, num_emitted, paths))

    def rollback_requests(self, step: Step | None) -> None:
        """Undo what the target rejected, by the requests' own numbers.

        Args:
            step: the step that has them; None is the one that has been announced.
        """
        if step is None:
            waiting = [handover.step for handover in self._queue if handover.ticket == self._announced[0]]
            step = waiting[0] if waiting else self._current()
        if step is not None:
            batch = step.requests
            self._failures.extend(self._builder.rollback_rejected(batch, self._builder.num_emitted(batch), None))

    def rollback_drafts(self) -> None:
        """End the draft loops under way."""
        self._builder.rollback_drafts()

    def init_arrivals(self, step: Step) -> None:
        """Attach the matchers of requests that come from elsewhere, ahead of the step's build."""
        for handover in self._queue:
            if handover.step is step:
                self._attaching.matchers = handover.matchers
                self._builder.init_arrivals(step.requests)

    def failed(self, error: BaseException) -> None:
        """Record what a host function raised: every guided request of its batch fails."""
        self._fail(describe(error))

    def orphaned(self, is_target: bool) -> None:
        """Stand in for a function whose graph was given up with a replay pending; a target's step is lost."""
        self._host.switches[:] = 0
        self._shown = None
        if is_target and self._fetch() is not None:
            self._fail("its graph was given up while a replay was pending; keep it until its replays are over")

    def weak_orphan(self, is_target: bool) -> Callable[[], None]:
        """Return `orphaned`, which does not keep this object alive."""
        return partial(_call_orphaned, weakref.ref(self), is_target)

    def _fail(self, message: str) -> None:
        self._running = self._shown = None
        self._host.switches[:] = 0
        self._failures.append((None, message))

    def _fetch(self) -> _Handover | None:
        """Take the announced step out of the queue, and those before it that nobody ran."""
        announced = int(self._announced[0])
        while self._queue and (announced - self._queue[0].ticket) % NUM_TICKETS < NUM_TICKETS // 2:
            handover = self._queue.popleft()
            if handover.ticket == announced:
                return handover
        return None

    def _current(self) -> Step | None:
        """Return the target step at hand, if it is the one that has been announced."""
        return self._running if self._running_ticket == self._announced[0] else None


def _call_orphaned(callbacks: "weakref.ref[StepCallbacks]", is_target: bool) -> None:
    alive = callbacks()
    if alive is not None:
        alive.orphaned(is_target)
