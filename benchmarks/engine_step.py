"""CPU side of one guided step (advance, fill, check, stage) against the engine library's own accept and fill calls.

Both sides see the same tokens: a JSON document is replayed from every slot, K legal drafts a step. The peer is the sum of
the library's calls on one thread, nothing around them. Rounds are interleaved, and who goes first alternates; ratios are
medians with the 20th and 80th percentile. Not shown: the copy to a device and the kernel, which overlap a forward pass.
`--cpu-time` counts the process's own time, all threads together: for machines that others use too.

    python benchmarks/engine_step.py [--slots 1,8,64,256] [--drafts 0,4] [--rounds 15] [--cpu-time] [--json]
"""

import argparse
import json
import statistics
import time

import gd_plugin as gd

WIDTH = 128_256
DOCUMENT = b'{"name": "Maria Keller", "age": 34, "tags": ["a", "bc"], "city": "Zurich"}'
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer"},
        "tags": {"type": "array", "items": {"type": "string"}},
        "city": {"type": "string"},
    },
    "required": ["name", "age", "tags", "city"],
}
LAST_START = 40


def vocabulary():
    """Bytes, then made-up words: as wide as a Llama 3 vocabulary."""
    words = [bytes([byte]) for byte in range(256)]
    letters = "etaoinshrdlucmfwypvbgkjqxz"
    for number in range(WIDTH - 1 - len(words)):
        stem = "".join(letters[number // 26**place % 26] for place in range(2 + number % 4))
        words.append(f"{' ' * (number % 2)}{stem}{number}".encode())
    return gd.Vocabulary.from_bytes([*words, None], stop_token_ids=[WIDTH - 1])


def library_calls(backend, matcher):
    """(accept, fill, rollback) of the library itself, on the same compiled grammar."""
    if backend == "xgrammar":
        engine = matcher._engine.fork()
        return engine.accept_token, engine.fill_next_token_bitmask, engine.rollback
    import llguidance.torch

    engine = matcher._engine.deep_copy()
    return (
        lambda token: engine.try_consume_tokens([token]),
        lambda bitmask, row: llguidance.torch.fill_next_token_bitmask(engine, bitmask, row),
        engine.rollback,
    )


def request(guide, slot, start, drafts):
    """A slot's request that stands at token `start` of the document; None is its prompt."""
    fields = {"guide": guide, "request_id": slot, "seq_slot": slot}
    if start is None:
        return gd.GuidedRequest(**fields, is_context_init_state=True, is_last_context_chunk=True)
    tokens = list(DOCUMENT)
    return gd.GuidedRequest(
        **fields,
        is_generation_in_progress_state=True,
        new_token=tokens[start],
        draft_tokens=tokens[start + 1 : start + 1 + drafts],
        history=tokens[:start],
    )


def measure(backend, factory, slots, drafts, rounds, clock):
    """Seconds of a step, ours and the library's, round by round."""
    guide, tokens = gd.Guide.json_schema(SCHEMA), list(DOCUMENT)
    decoder = gd.GuidedDecoder(
        factory, max_num_sequences=slots, vocab_size_padded=WIDTH, max_num_draft_tokens=drafts, device="cpu"
    )
    decoder.add_batch([request(guide, slot, None, drafts) for slot in range(slots)])
    if decoder.build():
        raise RuntimeError("the guide was refused")
    peers = [library_calls(backend, matcher) for matcher in decoder.grammar_matchers]
    bitmask = gd.allocate_token_bitmask(slots * (drafts + 1), WIDTH)
    consumed = [0] * slots
    ours, theirs = [], []
    for number in range(rounds + 2):
        starts = [(7 * number + slot) % LAST_START for slot in range(slots)]
        batch = [request(guide, slot, start, drafts) for slot, start in enumerate(starts)]
        for one in batch:
            # going to the start position is not part of the step
            decoder._attaching.replay(one)
            one.history = None
        for slot, (accept, _, rollback) in enumerate(peers):
            rollback(consumed[slot])
            for token in tokens[: starts[slot]]:
                accept(token)
            consumed[slot] = starts[slot] + drafts + 1

        def our_step(batch=batch):
            decoder.add_batch(batch)
            failed = decoder.build()
            decoder.copy_bitmask()
            if failed or any(count != drafts + 1 for count in decoder.num_guided_tokens):
                raise RuntimeError(f"the step went wrong: {failed[:1]}")

        def library_step(starts=starts):
            for slot, (accept, fill, _) in enumerate(peers):
                for draft in range(drafts + 1):
                    accept(tokens[starts[slot] + draft])
                    fill(bitmask, slot * (drafts + 1) + draft)

        # whoever comes second finds the grammar's memory in the caches
        sides = [(our_step, ours), (library_step, theirs)]
        for step, seconds in sides if number % 2 else reversed(sides):
            begun = clock()
            step()
            seconds.append(clock() - begun)
        words = slice(0, WIDTH // 32 - 1)
        if not (bitmask[:, words] == decoder.bitmask_host[:, words]).all():
            raise RuntimeError("the masks differ, so no time is worth printing")
    return ours[2:], theirs[2:]


def main():
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--slots", default="1,8,64,256")
    parser.add_argument("--drafts", default="0,4")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--backends", default="xgrammar,llguidance")
    parser.add_argument("--cpu-time", action="store_true")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    clock = time.process_time if options.cpu_time else time.perf_counter
    words, rows = vocabulary(), []
    for backend in options.backends.split(","):
        factory = gd.GrammarMatcherFactory(words, backend=backend)
        for drafts in map(int, options.drafts.split(",")):
            for slots in map(int, options.slots.split(",")):
                ours, theirs = measure(backend, factory, slots, drafts, options.rounds, clock)
                ratios = sorted(mine / peer for mine, peer in zip(ours, theirs, strict=True))
                row = {
                    "backend": backend,
                    "slots": slots,
                    "drafts": drafts,
                    "step_ms": 1e3 * statistics.median(ours),
                    "library_ms": 1e3 * statistics.median(theirs),
                    "ratio": statistics.median(ratios),
                    "ratio_20_80": [ratios[len(ratios) // 5], ratios[-1 - len(ratios) // 5]],
                }
                rows.append(row)
                if not options.json:
                    print(
                        f"{backend:<11} slots {slots:>3}  K {drafts}  step {row['step_ms']:8.3f} ms  library "
                        f"{row['library_ms']:8.3f} ms  ratio {row['ratio']:.2f} ({ratios[len(ratios) // 5]:.2f} to "
                        f"{row['ratio_20_80'][1]:.2f})",
                        flush=True,
                    )
    if options.json:
        print(json.dumps(rows, indent=2))


if __name__ == "__main__":
    main()
