"""Attaching in two halves: what may wait and compile stays on the caller's thread, a host function only puts matchers in.

In:  requests whose guides were submitted ahead, batches in the order in which the caller adds them.
Out: for each batch the matchers of the requests that start in it, ready to be put into their slots.

The caller's half has slots of its own, with owners alone: those of the decoder change on the driver's thread, some time
later, and with a process group every rank must decide from what all ranks know.
"""

import time
from concurrent.futures import Future
from typing import Any

from gd_plugin.decoding.attaching import FOLLOWER_TIMEOUT_S, Attaching, MatcherFactory
from gd_plugin.decoding.requests import GuidedRequest, GuidedRequests
from gd_plugin.decoding.slots import SlotStates
from gd_plugin.decoding.speculation import describe
from gd_plugin.errors import GuidedDecodingError
from gd_plugin.grammars.matcher import GrammarMatcher
from gd_plugin.guides.guide import Guide

__all__ = ["PreparedAttaching", "Preparing"]


class Preparing(Attaching):
    """The caller's half: compiles what is submitted, decides, makes the matchers of a batch.

    Attributes:
        matchers: of the batch decided last, by slot.
    """

    def __init__(self, factory: MatcherFactory, num_slots: int, timeout_s: float, group: Any, defer: bool) -> None:
        super().__init__(factory, SlotStates(num_slots), timeout_s, group, defer)
        self.matchers: dict[int, GrammarMatcher] = {}

    def submit(self, request: GuidedRequest) -> None:
        """Start compiling the request's guide; a factory that cannot do that ahead makes the matcher now."""
        if request.guide is None or request.request_id in self._submitted or hasattr(self._factory, "submit"):
            super().submit(request)
            return
        made: Future[Any] = Future()
        try:
            made.set_result(_Made(self._factory.create(request.guide)))
        except Exception as error:
            made.set_exception(error)
        self._submitted[request.request_id] = (made, time.monotonic())

    def decide(self, batch: GuidedRequests) -> list[GuidedRequest]:
        """Decide for each request that starts in this batch, and make its matcher if it was submitted."""
        starting = super().decide(batch)
        self.matchers = {}
        for request in starting:
            slot = request.slot
            if slot in batch.deferred:
                continue
            self._slots.attach(slot, request.request_id, request.guide, None)
            submitted = self._submitted.pop(request.request_id, None)
            if submitted is None or slot in batch.refused:
                continue
            try:
                matcher = self._matcher(request.guide, submitted[0].result(timeout=FOLLOWER_TIMEOUT_S))
                self.matchers[slot] = self._within_budget(request, matcher)
            except Exception as error:
                batch.refused[slot] = describe(error)
        return starting

    def _matcher(self, guide: Guide | None, compiled: Any) -> GrammarMatcher:
        # what `submit` of a factory of the caller's resolves to is its own affair; its `create` is quick by now
        create = getattr(compiled, "create_matcher", None)
        matcher: GrammarMatcher = self._factory.create(guide) if create is None else create()  # type: ignore[arg-type]
        return matcher


class PreparedAttaching(Attaching):
    """The host function's half: puts in matchers that are there already, and never waits or compiles.

    Attributes:
        matchers: of the batch being built, by slot; each is taken out when it is attached.
    """

    def __init__(self, slots: SlotStates) -> None:
        super().__init__(_NoFactory(), slots, 0.0, None, False)
        self.matchers: dict[int, GrammarMatcher] = {}

    def _create(self, request: GuidedRequest) -> GrammarMatcher:
        matcher = self.matchers.pop(request.slot, None)
        if matcher is None:
            raise GuidedDecodingError(
                "no precompiled grammar: a host function cannot compile; call submit([request]) when the request "
                "arrives, ahead of its first batch"
            )
        return matcher


class _Made:
    """A matcher in the place of a compiled grammar."""

    def __init__(self, matcher: GrammarMatcher) -> None:
        self._matcher = matcher

    def create_matcher(self) -> GrammarMatcher:
        return self._matcher


class _NoFactory:
    def create(self, guide: Guide) -> GrammarMatcher:
        raise GuidedDecodingError("host functions do not compile")
