"""Long runs in one process: many steps, many guides, many threads, with flat memory and the same masks throughout.

Short with the tests, long by `make soak`.
"""

import gc
import json
import random
import threading
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest
import torch

import gd_plugin as gd
from tests.fuzz import pick

pytestmark = pytest.mark.timeout(pick(120, 7200))
MEGABYTE = 1 << 20
GUIDES = [
    gd.Guide.json(),
    gd.Guide.json_schema({"type": "array", "items": {"type": "integer"}}),
    gd.Guide.regex(r"(ab|[0-9]{2}x)+"),
    gd.Guide.ebnf('root ::= "(" root ")" | "[" root "]" | "x"'),
    gd.Guide.choice([f"option {number}" for number in range(50)]),
    gd.Guide.regex(r"[a-z]+").with_reasoning(end="</t>"),
    gd.Guide.structural_tag({"format": {"type": "json_schema", "json_schema": {"type": "boolean"}}}),
    None,
]
BACKENDS = ["auto", "llguidance"]


@pytest.fixture(scope="module")
def vocabulary():
    tokens = [bytes([byte]) for byte in range(256)] + [b"ab", b"01", b'{"', b'":', b"option", None]
    return gd.Vocabulary.from_bytes(tokens, stop_token_ids=[261])


def used_bytes():
    """Memory of this process that is not shared, once what can be freed has been."""
    gc.collect()
    return psutil.Process().memory_full_info().uss


class Run:
    """A batch of requests, one a slot, whose tokens are drawn from their masks; a request that ends makes room."""

    def __init__(self, factory, slots, seed):
        self.decoder = gd.GuidedDecoder(
            factory, max_num_sequences=slots, vocab_size_padded=288, max_num_draft_tokens=2, device="cpu"
        )
        self.random, self.slots, self.num_requests = random.Random(seed), slots, 0
        self.requests = [None] * slots
        self.num_rows = self.num_ended = 0

    def request(self, slot):
        """The slot's next request: a new one, or the one that is there, one token further."""
        request = self.requests[slot]
        if request is None:
            self.num_requests += 1
            self.requests[slot] = request = gd.GuidedRequest(
                self.random.choice(GUIDES),
                self.num_requests,
                slot,
                is_context_init_state=True,
                is_last_context_chunk=True,
            )
        return request

    def step(self):
        batch = [
            self.request(slot) for slot in self.random.sample(range(self.slots), self.random.randint(1, self.slots))
        ]
        self.decoder.add_batch(batch)
        failed = self.decoder.build()
        assert failed == []
        words = self.decoder.bitmask_host.numpy().view("uint32")
        switches, counts, row = self.decoder.token_mask_host.tolist(), [], 0
        for request in batch:
            self.num_rows += 1
            guided = bool(switches[row])
            token = self.pick(words[row]) if guided else 261 if self.random.random() < 0.05 else 97
            row += 1 if request.is_context_init_state else 3
            counts.append(1)
            if token == 261 or (request.guide is not None and not guided) or self.random.random() < 0.005:
                self.requests[request.seq_slot] = None
                self.num_ended += 1
                continue
            request.is_context_init_state, request.is_generation_in_progress_state = False, True
            request.new_token, request.draft_tokens = token, [self.random.randrange(262) for _ in range(2)]
        assert self.decoder.rollback_rejected_batch(torch.tensor(counts, dtype=torch.int32)) == []

    def pick(self, row):
        """A legal token; ends where it may, in one case of four."""
        if row[261 >> 5] >> (261 & 31) & 1 and self.random.random() < 0.25:
            return 261
        start = self.random.randrange(262)
        return next(t for t in [*range(start, 262), *range(start)] if row[t >> 5] >> (t & 31) & 1)


@pytest.mark.parametrize("backend", BACKENDS)
def test_guided_steps_with_flat_memory(vocabulary, backend):
    total = pick(3_000, 1_000_000)
    run = Run(gd.GrammarMatcherFactory(vocabulary, backend=backend), 8, seed=0)
    while run.num_rows < total // 10:
        run.step()
    before = used_bytes()
    while run.num_rows < total:
        run.step()
    assert run.num_ended > total / 200
    # two megabytes for a million steps: two bytes a step
    assert used_bytes() - before < 2 * MEGABYTE + pick(6, 0) * MEGABYTE


def distinct_guides(number):
    """A guide of each kind that nobody else has."""
    name = f"key{number}"
    yield gd.Guide.json_schema({"type": "object", "properties": {name: {"type": "integer"}}, "required": [name]})
    yield gd.Guide.regex(f"{name}[a-f]{{{number % 17 + 1}}}")
    yield gd.Guide.choice([f"{name} {option}" for option in range(20)])
    yield gd.Guide.ebnf(f'root ::= "{name}" [0-9]+ root | "."')
    yield gd.Guide.json_schema({"type": "string", "pattern": f"^{name}[0-9]*$"})


@pytest.mark.parametrize("backend", BACKENDS)
def test_distinct_guides_with_flat_memory(vocabulary, backend):
    total = pick(100, 3_000)
    limit = 16 * MEGABYTE
    factory = gd.GrammarMatcherFactory(vocabulary, backend=backend, config=gd.GuidedDecodingConfig(cache_bytes=limit))
    bitmask = gd.allocate_token_bitmask(1, vocabulary.vocab_size)

    def run(first, last):
        for number in range(first, last, 5):
            for guide in distinct_guides(number):
                factory.create(guide).fill_next_token_bitmask(bitmask, 0)
                assert bitmask.any() and factory.cache_info().bytes <= limit

    run(0, total // 3)
    before = used_bytes()
    run(total // 3, total)
    assert factory.cache_info().misses >= total - 5
    # the cache is full after a few guides; caches of pieces of schemas, which are bounded by entries, still fill up
    assert used_bytes() - before < pick(24, 8) * MEGABYTE


def test_eight_threads(vocabulary):
    """One factory with a cache that keeps throwing guides out: each thread sees what it would see alone."""
    rounds = pick(3, 300)
    shared = gd.GrammarMatcherFactory(vocabulary, config=gd.GuidedDecodingConfig(cache_bytes=100_000))
    texts = ['{"a": [1, 2]}', "[1,22,333]", "abab12x", "([x])", "option 17", "thinking</t>word", "true"]
    expected = []
    for guide, text in zip(GUIDES, texts, strict=False):
        expected.append(gd.GrammarMatcherFactory(vocabulary).create(guide).validate_tokens([*text.encode(), 261]))
    assert expected == [len(text) + 1 for text in texts]
    barrier = threading.Barrier(8)

    def work(thread):
        choose = random.Random(thread)
        barrier.wait()
        for number in range(rounds):
            which = choose.randrange(len(texts))
            assert shared.create(GUIDES[which]).validate_tokens([*texts[which].encode(), 261]) == expected[which]
            own = gd.Guide.json_schema({"const": f"{thread} {number}"})
            text = json.dumps(f"{thread} {number}").encode()
            assert shared.create(own).validate_tokens([*text, 261]) == len(text) + 1
            if number % 20 == thread:
                shared.clear_cache()

    with ThreadPoolExecutor(8) as pool:
        for future in [pool.submit(work, thread) for thread in range(8)]:
            future.result()
    assert shared.cache_info().bytes <= 100_000
