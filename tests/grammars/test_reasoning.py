"""Free text before a guide, against a plain reading of the rules in bytes and against the mask's own accept set."""

import random
import re

import pytest
import torch

import gd_plugin as gd
from gd_plugin.grammars.reasoning import ReasoningGrammar

END = b"</t>"
TOKENS = [bytes([value]) for value in range(256)]
TOKENS += [
    b"</",
    b"t>",
    b"</t>",
    b"x</t",
    b">1",
    b">{",
    b"</t>12",
    b"</t>x",
    b"<<",
    b"12",
    b"\n\n",
    b" 1",
    b"\n<s>",
    b"<s",
    b"<s>a",
    b"a</t>1",
]
SPECIAL = len(TOKENS)
TOKENS += [None, None]
STOP = SPECIAL + 1


def make_vocabulary(names=None):
    return gd.Vocabulary(TOKENS, stop_token_ids=[STOP], special_token_names=names or {})


@pytest.fixture(scope="module")
def vocabulary():
    return make_vocabulary()


def matcher(vocabulary, guide):
    return gd.GrammarMatcherFactory(vocabulary).create(guide)


def token(text):
    return TOKENS.index(text)


def expected(ids, guide_pattern, max_tokens=None):
    """Whether a sequence of text tokens (no start marker) may stand so far, and whether it is complete."""
    data = b""
    for count, token_id in enumerate(ids):
        before, data = data, data + TOKENS[token_id]
        if max_tokens is not None and count >= max_tokens:
            matched = next(n for n in range(len(END), -1, -1) if before.endswith(END[:n]))
            rest = END[matched:]
            if not rest.startswith(TOKENS[token_id]) and not TOKENS[token_id].startswith(rest):
                return False, False
        place = data.find(END)
        if place >= 0:
            rest = (data[place + len(END) :] + b"".join(TOKENS[i] for i in ids[count + 1 :])).decode("latin-1")
            return can_begin(guide_pattern, rest), re.fullmatch(guide_pattern, rest) is not None
    return True, False


def can_begin(pattern, text):
    """Whether `[0-9]{2}x?` can go on from `text`."""
    assert pattern == "[0-9]{2}x?"
    return any(re.fullmatch(pattern, text + more) for more in ("", "0", "00", "0x"))


PATTERN = "[0-9]{2}x?"


@pytest.mark.parametrize("max_tokens", [None, 0, 1, 3])
def test_random_walks(vocabulary, max_tokens):
    rnd = random.Random(3)
    guide = gd.Guide.regex(PATTERN).with_reasoning(end=END.decode(), max_tokens=max_tokens)
    compiled = gd.GrammarMatcherFactory(vocabulary).compile(guide)
    assert isinstance(compiled, ReasoningGrammar)
    pieces = [b"<", b"/", b"t", b">", b"a", b"1", b"2", b"x", *TOKENS[256:SPECIAL]]
    complete = 0
    for _ in range(400):
        asked = compiled.create_matcher()
        ids = []
        for _ in range(8):
            token_id = token(rnd.choice(pieces))
            legal, done = expected([*ids, token_id], PATTERN, max_tokens)
            assert asked.accept_token(token_id) == legal, (ids, TOKENS[token_id])
            if legal:
                ids.append(token_id)
                assert asked.is_accepting() == done
                complete += done
            if ids and rnd.random() < 0.2:
                count = rnd.randint(1, len(ids))
                asked.rollback(count)
                del ids[-count:]
        assert asked.num_tokens == len(ids)
    assert complete > 5


def walk_and_compare(asked, vocabulary, ids):
    row = torch.full((2, (vocabulary.vocab_size + 31) // 32 + 1), -1, dtype=torch.int32)
    for count in range(len(ids) + 1):
        row.fill_(-1)
        asked.fill_next_token_bitmask(row, 1)
        assert row[0].eq(-1).all()
        legal = {i for i in range(row.shape[1] * 32) if row[1, i >> 5].item() >> (i & 31) & 1}
        accepted = set()
        for token_id in range(vocabulary.vocab_size):
            twin = asked.fork()
            if twin.accept_token(token_id):
                accepted.add(token_id)
        assert legal == accepted, (ids[:count], [TOKENS[i] for i in legal ^ accepted if i < SPECIAL])
        if count < len(ids):
            assert asked.accept_token(ids[count]), TOKENS[ids[count]]


SPELLINGS = [
    [b"a", b"<", b"</", b"t", b">1", b"2"],
    [b"<<", b"/", b"t>", b"12"],
    [b"x</t", b">1", b"2", b"x"],
    [b"a</t>1", b"2"],
    [b"</t>12"],
]


@pytest.mark.parametrize("spelling", SPELLINGS)
@pytest.mark.parametrize("max_tokens", [None, 6])
def test_mask_is_accept_set(vocabulary, spelling, max_tokens):
    guide = gd.Guide.regex(PATTERN).with_reasoning(end=END.decode(), max_tokens=max_tokens)
    walk_and_compare(matcher(vocabulary, guide), vocabulary, [token(text) for text in spelling])


OPENINGS = [
    # tokens, complete
    ([b"<", b"s", b">", b"a", b"</t>", b"12"], True),
    ([b"\n", b"<s", b">", b"</t>12"], True),
    ([b"\n<s>", b"</t>12"], True),
    ([b"<s>a", b"</t>", b"12"], True),
    ([b"12"], True),
    ([b"\n\n", b"12"], True),
    ([b"\n", b" 1", b"2"], True),
    ([b" 1", b"2", b"x"], True),
    ([b"<s", b">", b"12"], False),
]


@pytest.mark.parametrize(("spelling", "complete"), OPENINGS)
def test_opening(vocabulary, spelling, complete):
    guide = gd.Guide.regex(PATTERN).with_reasoning(start="<s>", end=END.decode())
    asked = matcher(vocabulary, guide)
    ids = [token(text) for text in spelling]
    walk_and_compare(asked, vocabulary, ids)
    assert asked.is_accepting() == complete
    assert asked.accept_token(STOP) == complete
    # back to every place, and forward again
    for count in range(len(ids) + complete + 1):
        asked.reset()
        assert asked.validate_tokens(ids) == len(ids)
        for token_id in ids:
            assert asked.accept_token(token_id)
        if complete:
            assert asked.accept_token(STOP)
            assert asked.is_terminated()
        asked.rollback(count)
        rest = [*ids, STOP][: len(ids) + complete][len(ids) + complete - count :]
        assert all(asked.accept_token(token_id) for token_id in rest)


def test_what_is_neither_marker_nor_space_is_the_guide(vocabulary):
    asked = matcher(vocabulary, gd.Guide.regex(PATTERN).with_reasoning(start="<s>", end=END.decode()))
    assert not asked.accept_token(token(b"a"))
    assert not asked.accept_token(STOP)
    assert asked.accept_token(token(b"<"))
    assert not asked.accept_token(token(b"1"))


def test_guide_may_look_like_the_start_marker(vocabulary):
    asked = matcher(vocabulary, gd.Guide.regex(r"\s*<s[0-9]").with_reasoning(start="<s>", end=END.decode()))
    walk_and_compare(asked, vocabulary, [token(text) for text in (b"\n", b"<s", b"1")])
    assert asked.is_accepting()


def test_special_token_is_the_marker():
    vocabulary = make_vocabulary({"</t>": SPECIAL})
    guide = gd.Guide.regex(PATTERN).with_reasoning(end="</t>", max_tokens=2)
    for ids in (
        [SPECIAL, token(b"12")],
        [token(b"a"), SPECIAL, token(b"12")],
        [token(b"a"), token(b"x</t"), token(b">1")],
    ):
        walk_and_compare(matcher(vocabulary, guide), vocabulary, ids)
    # from the budget on, nothing but the marker
    asked = matcher(vocabulary, guide)
    assert asked.validate_tokens([token(b"a"), token(b"b"), token(b"c")]) == 2
    assert asked.validate_tokens([token(b"a"), token(b"b"), SPECIAL, token(b"1")]) == 4


def test_stop_tokens_are_illegal_before_the_marker(vocabulary):
    asked = matcher(vocabulary, gd.Guide.regex("").with_reasoning(end=END.decode()))
    assert not asked.accept_token(STOP)
    assert not asked.is_accepting()
    assert asked.accept_token(token(b"</t>"))
    assert asked.is_accepting()
    assert asked.accept_token(STOP)


def test_fork_is_independent(vocabulary):
    asked = matcher(vocabulary, gd.Guide.regex(PATTERN).with_reasoning(end=END.decode()))
    assert asked.accept_token(token(b"x</t"))
    twin = asked.fork()
    assert twin.accept_token(token(b">1"))
    assert twin.accept_token(token(b"2"))
    assert asked.accept_token(token(b"a"))
    assert not asked.is_accepting()
    assert twin.is_accepting()
    twin.rollback(3)
    with pytest.raises(gd.RollbackError):
        twin.rollback(1)


def test_forced_text(vocabulary):
    asked = matcher(vocabulary, gd.Guide.regex(PATTERN).with_reasoning(end=END.decode(), max_tokens=1))
    assert asked.forced_text() == b""
    assert asked.accept_token(token(b"</"))
    assert asked.forced_text() == b"t>"


def test_marker_that_cannot_be_spelled():
    vocabulary = gd.Vocabulary.from_bytes([b"a", b"1", None], stop_token_ids=[2])
    with pytest.raises(gd.UnsatisfiableGuideError, match="end marker"):
        gd.GrammarMatcherFactory(vocabulary).compile(gd.Guide.regex("1").with_reasoning(end="</t>"))


def test_white_space_before_is_not_looked_at_again():
    words = [f"{a}{b}{c}".encode() for a in "abcd" for b in "0123456789" for c in "klmnopqrst"]
    tokens = [bytes([value]) for value in range(256)] + [b" " + word for word in words] + [b"\n\n", None]
    vocabulary = gd.Vocabulary.from_bytes(tokens, stop_token_ids=[len(tokens) - 1])
    compiled = gd.GrammarMatcherFactory(vocabulary).compile(gd.Guide.choice(["b3", "b4k!", "no"]).with_reasoning("<s>"))
    made = []
    create = compiled.inner.create_matcher
    compiled.inner.create_matcher = lambda: made.append(1) or create()
    asked = compiled.create_matcher()
    bitmask = gd.allocate_token_bitmask(1, vocabulary.vocab_size)
    asked.fill_next_token_bitmask(bitmask, 0)
    # the words that begin with "b" and the row of first tokens; not all 400
    assert len(made) <= 110
    del made[:]
    for _ in range(16):
        assert asked.accept_token(ord("\n"))
        asked.fill_next_token_bitmask(bitmask, 0)
    assert not made
    assert not asked.accept_token(ord("\n"))
    asked.reset()
    walk_for_masks = [i for i in range(256, len(tokens) - 1) if asked.validate_tokens([i])]
    assert [tokens[i] for i in walk_for_masks] == [b" b4k", b"\n\n"]
