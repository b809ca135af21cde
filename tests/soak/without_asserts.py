"""What the package does, in figures that are the same with `python -O`, which leaves asserts out.

python -O without_asserts.py
"""

import json
import random

import torch

import gd_plugin as gd

STOP = 256
GUIDES = [
    gd.Guide.json_schema({"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}),
    gd.Guide.regex(r"\d{2}(a|bc)*"),
    gd.Guide.ebnf('root ::= "(" root ")" | "x"'),
    None,
]
WRONG = [
    lambda: gd.Guide.regex("("),
    lambda: gd.Guide.ebnf("root ::= missing"),
    lambda: gd.Guide.regex("a").with_reasoning(end=""),
    lambda: gd.GrammarMatcherFactory(None),
    lambda: gd.GuidedDecodingConfig(backend=3),
    lambda: gd.allocate_token_bitmask(-1, 10),
    lambda: gd.apply_token_bitmask_(torch.zeros(1, 64), torch.zeros(1, 1, dtype=torch.int32), vocab_size=64),
    lambda: gd.VocabShard(3, 2, 10),
    lambda: gd.GuidedRequests([], -1),
    lambda: gd.DraftTree.from_parents([0]),
]


def raised(call):
    try:
        call()
    except Exception as error:
        return type(error).__name__
    return None


def outcomes():
    """Errors of what is wrong, then masks, failures and texts of a decoder and a processor."""
    vocabulary = gd.Vocabulary.from_bytes([*(bytes([byte]) for byte in range(256)), None], stop_token_ids=[STOP])
    found = {"wrong": [raised(call) for call in WRONG]}
    for backend in ("xgrammar", "llguidance"):
        found[backend] = decode(gd.GrammarMatcherFactory(vocabulary, backend=backend))
        processor = gd.GuidedLogitsProcessor(GUIDES, vocabulary=vocabulary, backend=backend)
        ids = torch.zeros((len(GUIDES), 1), dtype=torch.int64)
        for step in range(20):
            scores = torch.randn(len(GUIDES), 257, generator=torch.Generator().manual_seed(step))
            ids = torch.cat([ids, processor(ids, scores).argmax(dim=1, keepdim=True)], dim=1)
        found[f"{backend}, processor"] = [[result.status, result.text] for result in processor.results(ids)]
    return json.loads(json.dumps(found))


def decode(factory):
    rng, seen = random.Random(0), []
    decoder = gd.GuidedDecoder(
        factory, max_num_sequences=len(GUIDES), vocab_size_padded=288, max_num_draft_tokens=1, device="cpu"
    )
    tokens = [None] * len(GUIDES)
    for step in range(12):
        batch = [
            gd.GuidedRequest(
                guide,
                slot,
                slot,
                is_context_init_state=step == 0,
                is_last_context_chunk=step == 0,
                is_generation_in_progress_state=step > 0,
                new_token=tokens[slot],
                draft_tokens=[rng.randrange(257)],
            )
            for slot, guide in enumerate(GUIDES)
        ]
        decoder.add_batch(batch)
        logits = torch.zeros(decoder.requests.num_bitmask_tokens, 288)
        seen.append([request_id for request_id, _ in decoder.execute(logits)])
        decoder.rollback_rejected_batch(torch.ones(len(GUIDES), dtype=torch.int32))
        rows = logits[:: 1 if step == 0 else 2]
        seen.append(rows.isfinite().sum(dim=1).tolist())
        tokens = [rng.choice(row[:257].isfinite().nonzero().flatten().tolist()) for row in rows]
    return seen


if __name__ == "__main__":
    if __debug__:
        raise SystemExit("run it with python -O")
    print(json.dumps(outcomes()))
