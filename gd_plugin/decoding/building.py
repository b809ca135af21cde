"""The grammar work of one step: which requests take part, what each of them starts from, what goes wrong with whom.

In:  a batch of snapshots and the step's rows.
Out: rows filled, slots brought up to date, and (request id, message) of the requests that cannot go on.

Whatever one matcher does, raising included, stays with its request.
"""

from collections.abc import Sequence

from gd_plugin.decoding.attaching import Attaching
from gd_plugin.decoding.requests import GuidedRequest, GuidedRequests
from gd_plugin.decoding.rows import RowWriter
from gd_plugin.decoding.slots import SlotStates
from gd_plugin.decoding.speculation import (
    Advance,
    advance_chains,
    advance_tree,
    cut_drafts,
    describe,
    report_dead_end,
    rollback_rejected,
)

__all__ = ["BatchBuilder", "Failures"]

Failures = list[tuple[object, str]]


class BatchBuilder:
    """Builds batches on the slots of one decoder.

    Args:
        slots: state by slot.
        attaching: puts matchers into slots.
        open_rows: leave rows behind a refused draft open instead of repeating the last legal one.
        speculates: there are drafts at all, so that there is something to roll back.
    """

    def __init__(self, slots: SlotStates, attaching: Attaching, *, open_rows: bool, speculates: bool) -> None:
        self._slots = slots
        self._attaching = attaching
        self._open_rows = open_rows
        self._speculates = speculates

    def build(self, batch: GuidedRequests, rows: RowWriter) -> Failures:
        """Advance every request of the batch and fill its rows; their switches are all off before the call."""
        failures: Failures = []

        def report(chain: Advance, message: str, lost: bool) -> None:
            for row in range(chain.row, chain.row + len(chain.drafts) + 1):
                rows.switch_off(row)
            failures.append((chain.request.request_id, _message(chain.request, message)))
            if lost:
                self._slots.fail(chain.slot)

        chains = []
        for request, row in batch.valid_requests_with_offsets():
            chain = self._start(batch, request, row, failures)
            if chain is None:
                continue
            if request.draft_tree is None or request.is_draft or request.require_matcher_init():
                chains.append(chain)
                continue
            try:
                if not advance_tree(chain, self._slots, rows, open_rows=self._open_rows):
                    report_dead_end(chain, self._slots, report)
            except Exception as error:
                report(chain, _engine_failed(error), True)
        advance_chains(chains, self._slots, rows, open_rows=self._open_rows, report=report)
        if batch.is_draft:
            for chain in chains:
                self._slots.num_advanced_draft[chain.slot] += self._slots.num_advanced[chain.slot]
        return failures

    def _start(self, batch: GuidedRequests, request: GuidedRequest, row: int, failures: Failures) -> Advance | None:
        """Attach, or advance by the golden token; None if the request needs no row in this step."""
        slot, slots = request.slot, self._slots
        slots.num_advanced[slot] = slots.num_guided[slot] = 0
        slots.max_acceptable[slot] = 1
        if slot in batch.unreadable:
            failures.append((request.request_id, _message(request, batch.unreadable[slot])))
            return None
        try:
            drafts = _drafts(request, batch.max_num_draft_tokens)
            slots.max_acceptable[slot] = len(drafts) + 1
            starts = request.require_matcher_init()
            if slot in batch.deferred or not (starts or request.require_matcher_advance()):
                return None
            message = self._prepare(request, starts, batch.refused.get(slot))
            matcher = slots.matchers[slot]
            # the guards of an engine that runs one step ahead: there may be nothing left to advance
            if message is None and (matcher is None or matcher.is_terminated() or slots.draft_terminated[slot]):
                return None
            # a context step is credited with a token too, a phantom: nothing has been emitted yet
            if message is None and not starts:
                message = self._consume_golden(request)
            if message is None and matcher is not None and not slots.draft_terminated[slot]:
                slots.num_advanced[slot] = slots.max_acceptable[slot] = 1
                if not matcher.is_terminated():
                    return Advance(request, slot, matcher, row, drafts)
                slots.num_advanced_draft[slot] += request.is_draft
        except Exception as error:
            slots.fail(slot)
            message = _engine_failed(error)
        if message is not None:
            slots.max_acceptable[slot] = 1
            failures.append((request.request_id, _message(request, message)))
        return None

    def _prepare(self, request: GuidedRequest, starts: bool, refusal: str | None) -> str | None:
        """Have the slot hold the request's matcher, behind its history; return what is wrong, or None."""
        slot, slots = request.slot, self._slots
        if starts:
            return self._attaching.attach(request, refusal)
        if not slots.owner_matches(slot, request.request_id):
            if self._attaching.arrives(request):
                return self._attaching.attach(request, refusal)
            return (
                "the slot holds no matcher of this request: it was in no context step here; set history or "
                "is_generation_only_first_iteration if its prompt was processed elsewhere"
            )
        if slots.errors[slot] is not None:
            message, slots.errors[slot] = slots.errors[slot], None
            return message
        if not request.is_draft:
            if slots.num_advanced_draft[slot] or slots.draft_terminated[slot]:
                # a draft loop that was left before its last step would have the golden token refused
                slots.rollback_drafts(slot)
            if request.history is not None and slots.matchers[slot] is not None:
                return self._attaching.replay(request)
        return None

    def _consume_golden(self, request: GuidedRequest) -> str | None:
        """Have the matcher accept the golden token; return what is wrong, or None."""
        slot, slots = request.slot, self._slots
        if request.new_token is None:
            return "new_token is missing"
        if slots.accept(slot, request.new_token):
            return None
        if request.is_draft:
            slots.draft_terminated[slot] = True
            return None
        return (
            f"token {request.new_token} is refused by the guide after {len(slots.tokens(slot))} tokens; text so far: "
            f"{slots.text(slot)!r}"
        )

    def init_arrivals(self, batch: GuidedRequests) -> None:
        """Attach matchers to the requests of the batch that come from elsewhere; the next build reports failures."""
        for request in batch.valid_requests():
            slot = request.slot
            if slot in batch.deferred or not self._attaching.arrives(request):
                continue
            try:
                message = self._attaching.attach(request, batch.refused.get(slot))
            except Exception as error:
                self._slots.fail(slot)
                message = _engine_failed(error)
            self._slots.errors[slot] = message

    def rollback_rejected(
        self, batch: GuidedRequests, counts: Sequence[int | None], paths: Sequence[Sequence[int]] | None
    ) -> Failures:
        """Undo what the target rejected.

        Args:
            batch: the requests that were verified.
            counts: tokens each of them emitted, bonus included; None where nothing was.
            paths: accepted nodes of draft trees; None takes the requests' own.
        """
        failures: Failures = []
        for position, (request, count) in enumerate(zip(batch.requests, counts, strict=True)):
            if count is None or self.credit(request) < 1:
                continue
            path = request.accepted_nodes if paths is None else paths[position]
            accepted, message = rollback_rejected(self._slots, request.slot, count, path)
            request.num_accepted_draft_tokens = accepted
            if message is not None:
                self._slots.errors[request.slot] = message
                failures.append((request.request_id, _message(request, message)))
        return failures

    def num_emitted(self, batch: GuidedRequests) -> list[int | None]:
        """Return the tokens that the target emitted, bonus included, as the requests themselves say.

        Raises:
            ValueError: a request that has drafts to undo does not say how many were accepted.
        """
        counts: list[int | None] = []
        for request in batch.requests:
            accepted = request.num_accepted_draft_tokens
            if accepted is None and self.credit(request) > 1:
                raise ValueError(
                    f"request {request.request_id!r} in slot {request.seq_slot}: num_accepted_draft_tokens is missing"
                )
            counts.append(None if accepted is None else accepted + 1)
        return counts

    def credit(self, request: GuidedRequest) -> int:
        """Tokens that the request's last build put on its matcher and that no rollback has settled yet."""
        if request.guide is None or not self._speculates:
            return 0
        slot = request.slot
        return self._slots.num_advanced[slot] if self._slots.owner_matches(slot, request.request_id) else 0

    def rollback_drafts(self) -> None:
        """End all draft loops under way; the next build reports failures."""
        for slot in range(len(self._slots)):
            try:
                self._slots.rollback_drafts(slot)
            except Exception as error:
                self._slots.fail(slot)
                self._slots.errors[slot] = f"the drafts could not be undone: {describe(error)}"


def _drafts(request: GuidedRequest, draft_len: int) -> Sequence[int]:
    if request.is_draft or request.is_context_init_state:
        return ()
    if request.draft_tree is not None:
        # a placeholder among the nodes of a tree is refused where it stands: nodes are not a sequence to be cut
        return list(request.draft_tokens or ())[: len(request.draft_tree[0]) - 1]
    return cut_drafts(request.draft_tokens, draft_len)


def _engine_failed(error: Exception) -> str:
    return f"the grammar engine failed: {describe(error)}"


def _message(request: GuidedRequest, message: str) -> str:
    return f"request {request.request_id!r} in slot {request.seq_slot}: {message}"
