"""What can stand in a guide's way, and how each case is told."""

import torch

import gd_plugin as gd

# a vocabulary that cannot spell everything: small letters and a stop token
LETTERS = [bytes([byte]) for byte in b"abcdefghijklmnopqrstuvwxyz"]
VOCABULARY = gd.Vocabulary.from_bytes([*LETTERS, None], stop_token_ids=[26])


def main() -> None:
    # 1. wrong as written: refused at once, with its place
    try:
        gd.Guide.regex("a(b")
    except gd.InvalidGuideError as error:
        print(f"1. {error}")

    # 2. well formed, and nothing can match it
    try:
        gd.GrammarMatcherFactory(VOCABULARY).create(
            gd.Guide.json_schema({"type": "integer", "minimum": 9, "maximum": 3})
        )
    except gd.GuideError as error:
        print(f"2. {type(error).__name__}: {error}")

    # 3. nothing this tokenizer can spell
    try:
        gd.GrammarMatcherFactory(VOCABULARY).create(gd.Guide.choice(["YES", "NO"]))
    except gd.GuideError as error:
        print(f"3. {type(error).__name__}: {error}")

    # a part of it cannot be spelled, and a row walks into that part
    guide = gd.Guide.choice(["no", "yES"])
    processor = gd.GuidedLogitsProcessor(guide, vocabulary=VOCABULARY, on_dead_end="raise")
    row = [0]  # the prompt
    processor(torch.tensor([row]), torch.zeros(1, VOCABULARY.vocab_size))
    row.append(LETTERS.index(b"y"))
    try:
        processor(torch.tensor([row]), torch.zeros(1, VOCABULARY.vocab_size))
    except gd.DeadEndError as error:
        print(f"   {error}")

    # 4. a text that does not match: where, and what was expected
    verdict = gd.validate(gd.Guide.regex(r"[0-9]{4}-[0-9]{2}"), "2024/05")
    print(f"4. {verdict}")

    # 5. before any model runs: who enforces it, and what it costs
    report = gd.lint(gd.Guide.json_schema({"type": "array", "items": {"type": "integer"}, "uniqueItems": True}))
    print(f"5. ok={report.ok}")
    for problem in report.problems:
        print(f"   {problem.backend}: {problem.pointer} {problem.message}")

    # 6. a matcher shows what may come next
    matcher = gd.GrammarMatcherFactory(VOCABULARY).create(gd.Guide.choice(["red", "rose"]))
    matcher.accept_token(ord("r") - ord("a"))
    bitmask = gd.allocate_token_bitmask(1, VOCABULARY.vocab_size)
    matcher.fill_next_token_bitmask(bitmask, 0)
    legal = [i for i in range(VOCABULARY.vocab_size) if bitmask[0, i // 32] >> (i % 32) & 1]
    print(f"6. behind 'r': {[VOCABULARY.token_bytes(i).decode() for i in legal]}")


if __name__ == "__main__":
    main()
