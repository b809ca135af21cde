"""Giving a request its matcher: when the guide starts, when a request arrives from elsewhere, when it comes back.

In:  the requests of a batch that hold no matcher yet.
Out: a matcher in the request's slot, behind its history, or the reason why there is none.

A guide may be compiled ahead (`submit`); then a batch waits for it, at most `timeout_s` from submission, or defers
the request. With a process group rank 0 alone decides whether a request attaches, is deferred or fails, in one
collective on the caller's thread, exactly when the batch, which all ranks share, holds a request without a matcher.
Building only carries the decision out.
"""

import time
from concurrent.futures import CancelledError, Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import Any, Final, Literal, Protocol, cast

import torch

from gd_plugin.decoding.requests import GuidedRequest, GuidedRequests
from gd_plugin.decoding.slots import SlotStates
from gd_plugin.decoding.speculation import describe
from gd_plugin.grammars.budgets import hold_to_budget
from gd_plugin.grammars.matcher import GrammarMatcher
from gd_plugin.guides.guide import Guide

__all__ = ["FOLLOWER_TIMEOUT_S", "Attaching", "MatcherFactory"]

_ATTACH: Final = ""
# not a message of any error
_DEFER: Final = "\0defer"
# bytes of one decision in the collective; a longer message is cut, on rank 0 too, so that all ranks report the same
_DECISION_BYTES: Final = 512
# seconds that the other ranks wait for a grammar that rank 0 has already
FOLLOWER_TIMEOUT_S: Final = 60.0


class MatcherFactory(Protocol):
    """What makes matchers: `GrammarMatcherFactory`, or anything with its `create`."""

    def create(self, guide: Guide) -> GrammarMatcher:
        """Return a new matcher at the start of `guide`."""


class Attaching:
    """Decides about and carries out what puts matchers into slots.

    Args:
        factory: has `create(guide)`, and `submit(guide)` if guides are to be compiled ahead.
        slots: where matchers go.
        timeout_s: seconds from submission that a batch waits for a grammar.
        group: process group of ranks with the same batches, or None.
        defer: do not wait; put the request off until the time is over.
    """

    def __init__(self, factory: MatcherFactory, slots: SlotStates, timeout_s: float, group: Any, defer: bool) -> None:
        self._factory = factory
        self._slots = slots
        self._timeout_s = timeout_s
        self._group = group
        self._defer = defer
        # request id -> its compilation and when it was submitted
        self._submitted: dict[object, tuple[Future[Any], float]] = {}

    def submit(self, request: GuidedRequest) -> None:
        """Start compiling the request's guide, unless that has been done or the factory cannot."""
        submit = getattr(self._factory, "submit", None)
        if submit is None or request.guide is None or request.request_id in self._submitted:
            return
        try:
            future = submit(request.guide)
        except Exception as error:
            future = Future()
            future.set_exception(error)
        self._submitted[request.request_id] = (future, time.monotonic())

    def cancel(self, request_id: object) -> None:
        """Forget a submitted request that will not come."""
        self._submitted.pop(request_id, None)

    def poll(self, request_id: object) -> Literal["pending", "ready", "failed"]:
        """Tell how far the grammar of a submitted request is; of one that was not submitted, attaching will tell."""
        if request_id not in self._submitted:
            return "ready"
        future, submitted = self._submitted[request_id]
        if not future.done():
            return "pending" if time.monotonic() < submitted + self._timeout_s else "failed"
        return "ready" if not future.cancelled() and future.exception() is None else "failed"

    def arrives(self, request: GuidedRequest) -> bool:
        """Tell whether the request is in mid-generation and its slot does not know it."""
        if not (request.is_generation_only_first_iteration or request.history is not None):
            return False
        if request.is_draft or request.require_matcher_init():
            return False
        return not self._slots.owner_matches(request.slot, request.request_id)

    def starts(self, request: GuidedRequest) -> bool:
        """Tell whether this step gives the request its matcher."""
        return request.require_matcher_init() or self.arrives(request)

    def decide(self, batch: GuidedRequests) -> list[GuidedRequest]:
        """Decide for each request that starts in this batch, and write down in the batch who is refused or put off.

        Returns:
            The requests that start.
        """
        starting = [request for request in batch.valid_requests() if self.starts(request)]
        if not starting:
            return starting
        if self._group is None:
            decisions = [self._decision(request) for request in starting]
        else:
            for request in starting:
                self.submit(request)
            decisions = self._rank_0_decisions(starting)
        for request, decision in zip(starting, decisions, strict=True):
            if decision == _DEFER:
                batch.deferred.add(request.slot)
            elif decision != _ATTACH:
                batch.refused[request.slot] = decision
        return starting

    def _decision(self, request: GuidedRequest) -> str:
        if request.request_id not in self._submitted:
            return _ATTACH
        future, submitted = self._submitted[request.request_id]
        left = submitted + self._timeout_s - time.monotonic()
        try:
            future.result(timeout=0 if self._defer else max(left, 0))
        except FutureTimeoutError:
            if future.done():
                # a timeout of the engine's own, or it came at the last moment
                error = future.exception()
                return _ATTACH if error is None else describe(error)
            if self._defer and left > 0:
                return _DEFER
            # not cancelled: whoever has the same guide waits for the same future
            return f"its grammar was not compiled within {self._timeout_s:g} s"
        except CancelledError:
            return "its compilation was cancelled; submit the request again"
        except Exception as error:
            return describe(error)
        return _ATTACH

    def _rank_0_decisions(self, starting: list[GuidedRequest]) -> list[str]:
        """One broadcast from rank 0: a fixed number of bytes a request, a length and then text."""
        import torch.distributed as dist

        payload = torch.zeros((len(starting), _DECISION_BYTES), dtype=torch.uint8)
        if dist.get_rank(self._group) == 0:
            for position, request in enumerate(starting):
                text = self._decision(request).encode()[: _DECISION_BYTES - 2]
                payload[position, :2] = torch.tensor(divmod(len(text), 256), dtype=torch.uint8)
                payload[position, 2 : 2 + len(text)] = torch.frombuffer(bytearray(text or b"\0"), dtype=torch.uint8)[
                    : len(text)
                ]
        # nccl moves device memory only
        on_device = payload.cuda() if "nccl" in str(dist.get_backend(self._group)) else payload
        dist.broadcast(on_device, group=self._group, group_src=0)
        rows = [bytes(row) for row in on_device.cpu().tolist()]
        return [row[2 : 2 + 256 * row[0] + row[1]].decode("utf-8", "ignore") for row in rows]

    def attach(self, request: GuidedRequest, refusal: str | None) -> str | None:
        """Put the request's matcher into its slot; return what is wrong, or None. The slot is claimed either way.

        Args:
            request: one that starts.
            refusal: why it is to have no matcher, if `decide` came to that.
        """
        slot, slots = request.slot, self._slots
        if refusal is not None:
            self._submitted.pop(request.request_id, None)
            slots.attach(slot, request.request_id, request.guide, None)
            return refusal
        if slots.is_live(slot, request.request_id, request.guide):
            # the same request once more, after preemption or a repeated step
            matcher = slots.matchers[slot]
        else:
            try:
                matcher = self._create(request)
            except Exception as error:
                slots.attach(slot, request.request_id, request.guide, None)
                return describe(error)
            slots.attach(slot, request.request_id, request.guide, matcher)
        return self.replay(request)

    def _create(self, request: GuidedRequest) -> GrammarMatcher:
        submitted = self._submitted.pop(request.request_id, None)
        if submitted is not None:
            # decided already; only another rank than 0 can have to wait here
            submitted[0].result(timeout=FOLLOWER_TIMEOUT_S)
        # only requests with a guide start
        matcher = self._factory.create(cast(Guide, request.guide))
        return self._within_budget(request, matcher)

    def _within_budget(self, request: GuidedRequest, matcher: GrammarMatcher) -> GrammarMatcher:
        if request.max_new_tokens is None or request.guide is None:
            return matcher
        return hold_to_budget(matcher, self._factory, request.guide, request.max_new_tokens)

    def replay(self, request: GuidedRequest) -> str | None:
        """Bring the request's matcher behind its history, whatever it has consumed; return what is wrong, or None."""
        slot, history = request.slot, request.history or ()
        refused = self._slots.replay(slot, history)
        if refused is None:
            return None
        text = self._slots.text(slot)
        self._slots.fail(slot)
        return f"token {history[refused]} at position {refused} of its history is refused; text before it: {text!r}"
