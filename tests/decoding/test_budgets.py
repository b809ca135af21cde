"""`GuidedRequest.max_new_tokens`: whatever is sampled under the masks, the guide is complete within the budget."""

import json
import random
import re

import pytest
import torch

import gd_plugin as gd
from gd_plugin.testing import SimulatedDevice
from tests.fuzz import pick

SCHEMA = gd.Guide.json_schema(
    {
        "type": "object",
        "properties": {"a": {"type": "string"}, "b": {"type": "array", "items": {"type": "integer"}}},
        "required": ["a", "b"],
        "additionalProperties": False,
    }
)
PATTERN = "(ab)*c{2,9}|b+"
GUIDES = [gd.Guide.json(), SCHEMA, gd.Guide.regex(PATTERN)]


def is_complete(guide, text):
    if guide.guide_type.value == "regex":
        return re.fullmatch(PATTERN, text) is not None
    value = json.loads(text)
    return guide is not SCHEMA or (isinstance(value["a"], str) and all(type(item) is int for item in value["b"]))


def shortest(kit, factory, guide):
    """The number that a refusal names."""
    decoder = kit.decoder(factory)
    ((_, message),) = kit.step(decoder, kit.context(guide, max_new_tokens=1))
    assert "max_new_tokens=1 is too small" in message
    return int(message.rsplit("=", 1)[1])


def masked(decoder, row):
    words = decoder.bitmask_host[row].tolist()
    return [i for i in range(16) if words[i // 32] >> (i % 32) & 1]


class Walk:
    """One request whose target samples whatever the masks allow, as far from an end as it can."""

    def __init__(self, kit, guide, budget, slot, rng, trees=False):
        self.kit, self.guide, self.budget, self.slot, self.rng, self.trees = kit, guide, budget, slot, rng, trees
        # parents of the nodes, node 0 is the golden token; the nodes that were accepted
        self.emitted, self.drafts, self.parents, self.nodes = [], [], [-1], []

    @property
    def is_done(self):
        return bool(self.emitted) and self.emitted[-1] == self.kit.STOP

    def request(self):
        if not self.emitted:
            return self.kit.context(self.guide, slot=self.slot, max_new_tokens=self.budget)
        self.drafts = [self.rng.randrange(16) for _ in range(self.rng.choice([0, 0, 1, 3]))]
        nodes = range(1, len(self.drafts) + 1)
        self.parents = [-1, *(self.rng.randrange(node) if self.trees else node - 1 for node in nodes)]
        tree = {"draft_tree": gd.DraftTree.from_parents(self.parents)} if self.trees and self.drafts else {}
        tokens = [self.emitted[-1], *self.drafts]
        return self.kit.generation(self.guide, tokens, slot=self.slot, max_new_tokens=self.budget, **tree)

    def sample(self, decoder, row):
        """Emit at the row of every accepted node what its mask allows; return how many."""
        node, count, self.nodes = 0, 0, []
        while True:
            legal = masked(decoder, row + node)
            assert legal, self.emitted
            token = self.rng.choice([t for t in legal if t != self.kit.STOP] or legal)
            self.emitted.append(token)
            count += 1
            agreeing = [
                child
                for child, parent in enumerate(self.parents)
                if parent == node and self.drafts[child - 1] == token and token != self.kit.STOP
            ]
            if not agreeing:
                return count
            node = agreeing[0]
            self.nodes.append(node)

    def check(self):
        assert len(self.emitted) <= self.budget
        assert self.is_done
        text = "".join(self.kit.STRINGS[token] for token in self.emitted[:-1])
        assert is_complete(self.guide, text), text


def run(kit, decoder, walks, submit):
    if submit:
        decoder.submit([walk.request() for walk in walks])
    for _ in range(400):
        going = [walk for walk in walks if not walk.is_done]
        if not going:
            break
        requests = [walk.request() for walk in going]
        decoder.add_batch(requests)
        if submit:
            failures = decoder.execute(torch.zeros(16, kit.PADDED))
        else:
            failures = decoder.build()
        assert failures == []
        row, counts = 0, []
        for walk, request in zip(going, requests, strict=True):
            counts.append(walk.sample(decoder, row))
            row += 1 if request.is_context_init_state else 4
        nodes = torch.tensor([[*walk.nodes, -1, -1, -1][:3] for walk in going], dtype=torch.int32)
        tree = {"accepted_nodes": nodes} if going[0].trees else {}
        assert decoder.rollback_rejected_batch(torch.tensor(counts, dtype=torch.int32), **tree) == []
    for walk in walks:
        walk.check()


@pytest.mark.parametrize("trees", [False, True], ids=["chains", "trees"])
@pytest.mark.parametrize("guide", GUIDES, ids=["json", "schema", "regex"])
def test_random_walks_with_drafts_are_complete_within_their_budgets(kit, factory, guide, trees):
    needed = shortest(kit, factory, guide)
    rng = random.Random(5)
    for _ in range(pick(6, 500)):
        decoder = kit.decoder(factory, slots=3)
        walks = [Walk(kit, guide, needed + rng.choice([0, 0, 1, 3, 10]), slot, rng, trees) for slot in range(3)]
        run(kit, decoder, walks, submit=False)


def test_budgets_hold_in_host_functions(kit, factory):
    rng = random.Random(6)
    guide = gd.Guide.regex(PATTERN)
    needed = shortest(kit, factory, guide)
    decoder = gd.CapturableGuidedDecoder(
        factory, max_num_sequences=2, vocab_size_padded=kit.PADDED, max_num_draft_tokens=3, device=SimulatedDevice()
    )
    run(kit, decoder, [Walk(kit, guide, needed + extra, slot, rng) for slot, extra in enumerate((0, 4))], submit=True)


def test_a_budget_below_the_minimum_fails_its_request_alone(kit, factory):
    decoder = kit.decoder(factory)
    failures = kit.step(decoder, kit.context(gd.Guide.regex("abc"), max_new_tokens=3), kit.context(GUIDES[0], slot=1))
    assert [request_id for request_id, _ in failures] == [0]
    assert "at least max_new_tokens=4" in failures[0][1]
    assert kit.switches(decoder, 2) == [0, 1]


@pytest.mark.parametrize("budget", [0, -1, 2.5, True])
def test_a_budget_that_is_no_number_of_tokens_fails_its_request(kit, factory, budget):
    ((_, message),) = kit.step(kit.decoder(factory), kit.context(gd.Guide.regex("abc"), max_new_tokens=budget))
    assert "positive number of tokens" in message


def test_a_factory_without_vocabulary_says_so(kit):
    class Factory:
        def create(self, guide):
            return kit.TableMatcher({"start": {8: "a"}, "a": {15: "$"}})

    ((_, message),) = kit.step(kit.decoder(Factory()), kit.context(GUIDES[0], max_new_tokens=9))
    assert "has no vocabulary" in message


def test_history_counts(kit, factory):
    guide = gd.Guide.regex("a*")
    decoder = kit.decoder(factory)
    history = kit.ids("aaa")
    assert kit.step(decoder, kit.context(guide, history=history, max_new_tokens=6)) == []
    assert kit.legal(decoder, 0) == {"a", "</s>"}
    assert kit.step(decoder, kit.generation(guide, "a", max_new_tokens=6)) == []
    assert kit.legal(decoder, 0) == {"a", "</s>"}
    assert kit.step(decoder, kit.generation(guide, "a", max_new_tokens=6)) == []
    assert kit.legal(decoder, 0) == {"</s>"}
    assert decoder.grammar_matchers[0].intervened
