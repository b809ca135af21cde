"""Draft trees: every node's row is what a fresh matcher says behind the node's path."""

import random
import re

import pytest
import torch

import gd_plugin as gd


def paths(parents, tokens):
    """Tokens from node 0 down to each node; node 0 has the golden token."""
    found = []
    for node, parent in enumerate(parents):
        found.append(([] if parent < 0 else found[parent]) + [tokens[node]])
    return found


def expected_row(kit, factory, path):
    """(legal tokens, terminated) behind `path`, or None if a token on it is refused."""
    matcher = factory.create(kit.JSON)
    for token in path:
        if not matcher.accept_token(token):
            return None
    row = gd.allocate_token_bitmask(1, 16)
    matcher.fill_next_token_bitmask(row, 0)
    return int(row[0, 0]), matcher.is_terminated()


def tree_step(kit, factory, parents, text, rows="repeat"):
    decoder = kit.decoder(factory, slots=1, drafts=max(len(parents) - 1, 1), rows=rows)
    kit.step(decoder, kit.context(kit.JSON))
    kit.settle(decoder, 1)
    request = kit.generation(kit.JSON, text, draft_tree=gd.DraftTree.from_parents(parents))
    assert kit.step(decoder, request) == []
    return decoder


#     {              golden
#   "    }           1, 2
#  a b   $ x         3, 4, 5, 6: a second stop and an illegal letter below the brace
PARENTS, TEXT = [-1, 0, 0, 1, 1, 2, 2], '{"}ab$a'


def test_a_row_for_each_node(kit, factory):
    decoder = tree_step(kit, factory, PARENTS, TEXT)
    for node, path in enumerate(paths(PARENTS, kit.ids(TEXT))):
        expected = expected_row(kit, factory, path)
        if expected is not None and not expected[1]:
            assert int(decoder.bitmask_host[node, 0]) == expected[0]
    # node 5 ends the guide; node 6 is refused and repeats the row of node 2
    assert kit.switches(decoder, 7) == [1, 1, 1, 1, 1, 0, 1]
    assert int(decoder.bitmask_host[6, 0]) == int(decoder.bitmask_host[2, 0])
    assert (decoder.num_advanced_tokens[0], decoder.num_guided_tokens[0], decoder.max_acceptable_tokens[0]) == (1, 5, 3)
    assert decoder.grammar_matchers[0].num_tokens == 1


def test_rows_of_refused_nodes_stay_open_on_request(kit, factory):
    decoder = tree_step(kit, factory, PARENTS, TEXT, rows="open")
    assert kit.switches(decoder, 7) == [1, 1, 1, 1, 1, 0, 0]


@pytest.mark.parametrize(
    ("emitted", "nodes", "consumed"),
    [(1, [], "{"), (2, [1], '{"'), (3, [1, 4], '{"b'), (2, [2], "{}"), (3, [2, 5], "{}$")],
)
def test_the_accepted_path_is_replayed(kit, factory, emitted, nodes, consumed):
    decoder = tree_step(kit, factory, PARENTS, TEXT)
    counts = torch.tensor([emitted], dtype=torch.int32)
    padded = torch.tensor([nodes + [-1] * (3 - len(nodes))], dtype=torch.int32)
    assert decoder.rollback_rejected_batch(counts, padded) == []
    assert decoder.grammar_matchers[0].num_tokens == len(consumed)
    assert decoder.rollback_rejected_batch(counts, padded) == []
    assert decoder.grammar_matchers[0].num_tokens == len(consumed)
    fresh = factory.create(kit.JSON)
    assert all(map(fresh.accept_token, kit.ids(consumed)))
    assert row_of(decoder.grammar_matchers[0]) == row_of(fresh)


def row_of(matcher):
    row = gd.allocate_token_bitmask(1, 16)
    matcher.fill_next_token_bitmask(row, 0)
    return int(row[0, 0])


def test_the_accepted_path_by_the_requests_own_word(kit, factory):
    decoder = tree_step(kit, factory, PARENTS, TEXT)
    decoder.add_batch([kit.generation(kit.JSON, "a", num_accepted_draft_tokens=2, accepted_nodes=[1, 4])])
    assert decoder.rollback_rejected_tokens() == []
    assert decoder.build() == []
    assert decoder.grammar_matchers[0].num_tokens == 4


@pytest.mark.parametrize(
    ("emitted", "nodes", "message"),
    [
        (3, [2, 6], "node 6 .* refuses"),
        (3, [1], "2 drafts of a tree were accepted but 1 nodes are named"),
        (2, [9], "node 9 is not in"),
        (0, [], "at least 1"),
    ],
)
def test_an_impossible_path_fails_the_request(kit, factory, emitted, nodes, message):
    decoder = tree_step(kit, factory, PARENTS, TEXT)
    decoder.add_batch(
        [kit.generation(kit.JSON, "a", num_accepted_draft_tokens=emitted - 1, accepted_nodes=nodes)], None
    )
    [(request_id, text)] = decoder.rollback_rejected_tokens()
    assert request_id == 0
    assert re.search(message, text)
    assert [request_id for request_id, _ in decoder.build()] == [0]


def test_what_follows_a_stop_token_on_the_path_is_dropped(kit, factory):
    parents, text = [-1, 0, 1, 2], "{}$a"
    decoder = tree_step(kit, factory, parents, text)
    assert kit.switches(decoder, 4) == [1, 1, 0, 0]
    assert decoder.max_acceptable_tokens[0] == 3
    counts = torch.tensor([4], dtype=torch.int32)
    assert decoder.rollback_rejected_batch(counts, torch.tensor([[1, 2, 3]], dtype=torch.int32)) == []
    assert decoder.grammar_matchers[0].is_terminated()
    assert decoder.requests.requests[0].num_accepted_draft_tokens == 2


def test_random_trees(kit, factory):
    rng = random.Random(7)
    likely = kit.ids('{}[]":,a1')
    for _ in range(60):
        num_nodes = rng.randint(1, 12)
        parents = [-1] + [rng.randrange(node) for node in range(1, num_nodes)]
        tokens = [kit.ids("{")[0]] + [rng.choice([*likely, kit.STOP, -1]) for _ in range(num_nodes - 1)]
        decoder = kit.decoder(factory, slots=1, drafts=12)
        kit.step(decoder, kit.context(kit.JSON))
        kit.settle(decoder, 1)
        request = kit.generation(kit.JSON, tokens, draft_tree=gd.DraftTree.from_parents(parents))
        assert kit.step(decoder, request) == []
        assert decoder.grammar_matchers[0].num_tokens == 1
        longest = 0
        for node, path in enumerate(paths(parents, tokens)):
            expected = expected_row(kit, factory, path)
            switched = int(decoder.token_mask_host[node])
            if expected is None:
                above = parents[node]
                assert switched == int(decoder.token_mask_host[above])
                if switched:
                    assert torch.equal(decoder.bitmask_host[node], decoder.bitmask_host[above])
                continue
            longest = max(longest, len(path))
            assert switched == (not expected[1])
            assert expected[1] or int(decoder.bitmask_host[node, 0]) == expected[0]
        assert decoder.max_acceptable_tokens[0] == longest


def test_a_tree_next_to_a_chain_and_a_fault(kit):
    table = {"start": {8: "a"}, "a": {9: "b", 10: "b"}, "b": {15: "$"}}
    factory = kit.TableFactory({"abc": table})
    guide = gd.Guide.regex("abc")
    decoder = kit.decoder(factory, slots=3)
    kit.step(decoder, *(kit.context(guide, slot=slot) for slot in range(3)))
    kit.settle(decoder, 1, 1, 1)

    def broken(call):
        if call == "rollback":
            raise RuntimeError("rollback broke")

    factory.made[1].fault = broken
    tree = ([1, -1, -1], [-1, 2, -1])
    batch = [kit.generation(guide, "abc", slot=slot, draft_tree=tree) for slot in range(2)]
    failed = kit.step(decoder, *batch, kit.generation(guide, "ab$", slot=2))
    assert [request_id for request_id, _ in failed] == [1]
    assert kit.switches(decoder, 12) == [1, 1, 1, 0, 0, 0, 0, 0, 1, 1, 0, 0]


def test_a_dead_end_behind_the_golden_token_of_a_tree(kit):
    factory = kit.TableFactory({"abc": {"start": {8: "a"}, "a": {}}})
    guide = gd.Guide.regex("abc")
    decoder = kit.decoder(factory, slots=1)
    kit.step(decoder, kit.context(guide))
    kit.settle(decoder, 1)
    request = kit.generation(guide, "ab", draft_tree=([1, -1], [-1, -1]))
    assert [request_id for request_id, _ in kit.step(decoder, request)] == [0]
    assert decoder.grammar_matchers[0].num_tokens == 0
    assert kit.switches(decoder) == [0, 0, 0, 0]
