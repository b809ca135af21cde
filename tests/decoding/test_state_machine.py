"""Random schedules. After every build and rollback a slot's matcher equals a fresh one fed the emitted tokens.

Requests come and go, prompts take one or two chunks, drafts are legal, illegal or placeholders, some run a draft loop in
between, some are preempted and come back with their history, and a target accepts whatever the masks allow.
"""

import os

import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

import gd_plugin as gd

CI = os.environ.get("GD_PLUGIN_FUZZ", "ci") == "ci"
SLOTS, DRAFTS = 3, 3
GUIDES = [gd.Guide.json(), gd.Guide.regex("a+b?c"), gd.Guide.choice(["ab", "abc", "{1}"])]


def row_of(matcher):
    row = gd.allocate_token_bitmask(1, 16)
    matcher.fill_next_token_bitmask(row, 0)
    return int(row[0, 0]), matcher.is_terminated()


class Running:
    """The engine's own record of one request."""

    def __init__(self, guide, request_id):
        self.guide, self.request_id = guide, request_id
        self.emitted = []  # the last one is the bonus: the next golden token
        self.prompt_left = 1


class Schedules(RuleBasedStateMachine):
    factory = kit = None

    @initialize(rows=st.sampled_from(["repeat", "open"]))
    def start(self, rows):
        self.decoder = self.kit.decoder(self.factory, slots=SLOTS, drafts=DRAFTS, rows=rows)
        self.open_rows = rows == "open"
        self.running, self.next_id = {}, 0

    def fresh(self, request, tokens):
        matcher = self.factory.create(request.guide)
        assert all(matcher.accept_token(token) for token in tokens)
        return matcher

    def legal(self, matcher):
        bits, _ = row_of(matcher)
        return [token for token in range(16) if bits >> token & 1]

    @rule(slot=st.integers(0, SLOTS - 1), guide=st.sampled_from([*GUIDES, None]), chunks=st.integers(1, 2))
    def admit(self, slot, guide, chunks):
        if slot not in self.running:
            self.running[slot] = Running(guide, self.next_id)
            self.running[slot].prompt_left = chunks
            self.next_id += 1

    @rule(slot=st.integers(0, SLOTS - 1), back=st.booleans())
    def preempt(self, slot, back):
        if slot in self.running and back:
            self.running[slot].prompt_left = 1
        else:
            self.running.pop(slot, None)

    @rule(data=st.data(), draft_len=st.integers(0, DRAFTS))
    def step(self, data, draft_len):
        order = data.draw(st.permutations(sorted(self.running)))
        requests, plans = [], []
        for slot in order:
            request = self.running[slot]
            if request.prompt_left:
                requests.append(self.prompt_request(slot, request))
                plans.append(None)
            else:
                drafts = self.propose(data, request, draft_len)
                requests.append(self.generation_request(slot, request, drafts))
                plans.append(drafts)
        self.decoder.add_batch(requests, runtime_draft_len=draft_len)
        assert self.decoder.build() == []
        counts = [self.verify(data, slot, plan) for slot, plan in zip(order, plans, strict=True)]
        if draft_len and data.draw(st.booleans()):
            self.draft_loop(data, order, counts, draft_len)
        else:
            assert self.settle(counts) == []
        for slot in list(order):
            self.finish(slot)

    def prompt_request(self, slot, request):
        request.prompt_left -= 1
        return gd.GuidedRequest(
            guide=request.guide,
            request_id=request.request_id,
            seq_slot=slot,
            is_context_init_state=True,
            is_last_context_chunk=not request.prompt_left,
            history=list(request.emitted),
        )

    def generation_request(self, slot, request, drafts):
        return gd.GuidedRequest(
            guide=request.guide,
            request_id=request.request_id,
            seq_slot=slot,
            is_generation_in_progress_state=True,
            new_token=request.emitted[-1],
            draft_tokens=drafts,
        )

    def propose(self, data, request, draft_len):
        drafts, matcher = [], None
        if request.guide is not None:
            matcher = self.fresh(request, request.emitted)
        for _ in range(data.draw(st.integers(0, draft_len))):
            legal = list(range(16)) if matcher is None or matcher.is_terminated() else self.legal(matcher)
            token = data.draw(st.sampled_from(legal) | st.integers(-1, 15))
            drafts.append(token)
            if matcher is not None and not matcher.accept_token(token):
                matcher = None
        return drafts

    def verify(self, data, slot, drafts):
        """What an exact target does: accept drafts while they are legal, then emit a legal bonus token."""
        request = self.running[slot]
        if drafts is None and request.prompt_left:
            return 1
        drafts = [] if drafts is None else drafts
        if request.guide is None:
            request.emitted.append(0)
            return 1
        matcher, accepted = self.fresh(request, request.emitted), 0
        for token in drafts:
            if token < 0 or not data.draw(st.booleans()) or not matcher.accept_token(token):
                break
            accepted += 1
            request.emitted.append(token)
            if matcher.is_terminated():
                break
        if not matcher.is_terminated():
            request.emitted.append(data.draw(st.sampled_from(self.legal(matcher))))
        else:
            # the bonus behind a stop token is whatever the model says
            request.emitted.append(0)
        assert accepted + 1 <= self.decoder.max_acceptable_tokens[slot]
        return accepted + 1

    def settle(self, counts):
        return self.decoder.rollback_rejected_batch(torch.tensor(counts, dtype=torch.int32))

    def draft_loop(self, data, order, counts, draft_len):
        tokens = [self.running[slot].emitted[-1] if self.running[slot].emitted else 0 for slot in order]
        for draft_step in range(draft_len):
            self.decoder.add_draft_batch(
                torch.tensor(tokens, dtype=torch.int32), torch.tensor(counts, dtype=torch.int32), draft_step
            )
            logits = torch.zeros(len(order), self.kit.PADDED)
            assert self.decoder.execute_draft_batch(logits, draft_step=draft_step) == []
            tokens = [data.draw(st.integers(0, 15)) for _ in order]

    def finish(self, slot):
        request = self.running[slot]
        if request.prompt_left or request.guide is None:
            return
        matcher = self.decoder.grammar_matchers[slot]
        if self.kit.STOP in request.emitted[:-1]:
            assert matcher.is_terminated()
            del self.running[slot]

    @invariant()
    def matchers_are_where_the_text_is(self):
        for slot, request in getattr(self, "running", {}).items():
            if request.guide is None or request.prompt_left or not request.emitted:
                continue
            matcher = self.decoder.grammar_matchers[slot]
            fresh = self.fresh(request, request.emitted[:-1])
            assert matcher.num_tokens == len(request.emitted) - 1
            assert row_of(matcher) == row_of(fresh)


def test_random_schedules(kit, factory):
    machine = type("Machine", (Schedules,), {"factory": factory, "kit": kit})
    test = machine.TestCase
    test.settings = settings(
        derandomize=CI, max_examples=60 if CI else 2000, stateful_step_count=20, deadline=None, database=None
    )
    test().runTest()
