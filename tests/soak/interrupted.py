"""A process that is interrupted at random moments, many times, and says whether everything still works.

python interrupted.py compile|generate NUMBER SEED
"""

import os
import random
import signal
import sys

import torch

import gd_plugin as gd

# the same handler as of an interrupt at the terminal, on a timer's signal
signal.signal(signal.SIGALRM, signal.default_int_handler)
# a shell has its background jobs ignore interrupts, and those they start
signal.signal(signal.SIGINT, signal.default_int_handler)
STOP = 256
VOCABULARY = gd.Vocabulary.from_bytes([*(bytes([byte]) for byte in range(256)), None], stop_token_ids=[STOP])


def interrupted(function, seconds):
    """Run and interrupt a function; return whether the interrupt came before its end."""
    try:
        try:
            signal.setitimer(signal.ITIMER_REAL, seconds)
            function()
        finally:
            # the interrupt may come here too
            signal.setitimer(signal.ITIMER_REAL, 0)
    except KeyboardInterrupt:
        return True
    return False


def small(number):
    return gd.Guide.choice([f"{number} one", f"{number} two"]), f"{number} two"


def large(number):
    """Compiled in a process of its own."""
    return gd.Guide.regex(rf"(ab|[^c]){{{2000 + number}}}x"), "d" * (2000 + number) + "x"


# seconds, in the process of its own
_RULES = [f'r{number} ::= r{number + 1} | "x{number}"' for number in range(2500)]
SLOW = gd.Guide.ebnf("\n".join(["root ::= r0", *_RULES, 'r2500 ::= "c"']))


def check(factory, guide, text):
    ids = [*text.encode(), STOP]
    if factory.create(guide).validate_tokens(ids) != len(ids) or factory.create(guide).validate_tokens([ord("c")]) != 0:
        raise SystemExit(f"the wrong grammar for {guide!r:.80}")


def interrupt_compilations(number, rng):
    # wall-clock time: the machine may be busy
    config = gd.GuidedDecodingConfig(compile_timeout_s=600.0)
    factory = gd.GrammarMatcherFactory(VOCABULARY, backend="xgrammar", config=config)
    check(factory, *large(0))
    count = 0
    for turn in range(number):
        guide, text = large(turn // 25 % 5 + 1) if turn % 25 == 24 else small(turn)
        factory.clear_cache()
        reach = 1.0 if turn % 25 == 24 else 0.001
        count += interrupted(lambda guide=guide: factory.compile(guide), rng.uniform(1e-5, reach))
        # the same one, which nobody may be left waiting for, and another, which must not get its answer
        check(factory, guide, text)
        check(factory, *small(-turn))
        future = factory.submit(small(turn + 10**6)[0])
        future.result(600)
    # an interrupt at the terminal reaches all of its processes: the one that compiles leaves it to this one
    factory.clear_cache()
    signal.signal(signal.SIGALRM, lambda *_: os.killpg(0, signal.SIGINT))
    if not interrupted(lambda: factory.compile(SLOW), 0.2):
        raise SystemExit("the slow guide was compiled before the interrupt")
    check(factory, *large(7))
    return count + 1


def interrupt_generation(number, rng):
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=257,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        eos_token_id=STOP,
        bos_token_id=0,
        pad_token_id=STOP,
        initializer_range=0.5,
    )
    model = LlamaForCausalLM(config).eval()
    guides = [gd.Guide.regex("(abc|de)+f"), gd.Guide.json_schema({"type": "array", "items": {"type": "boolean"}})]
    prompt = {"input_ids": torch.tensor([[65, 66], [67, 68]]), "attention_mask": torch.ones(2, 2, dtype=torch.int64)}

    def generate(processor):
        return model.generate(**prompt, max_new_tokens=24, do_sample=False, logits_processor=processor)

    expected = generate(gd.GuidedLogitsProcessor(guides, vocabulary=VOCABULARY))
    processor = gd.GuidedLogitsProcessor(guides, vocabulary=VOCABULARY)
    count = 0
    for turn in range(number):
        # a list is one processor for all calls, which has to find out by itself that a new one begins
        passed = [processor] if turn % 2 else processor
        count += interrupted(lambda passed=passed: generate(passed), rng.uniform(1e-4, 0.06))
        if turn % 2:
            processor.reset()
        output = generate(passed)
        if not torch.equal(output, expected):
            raise SystemExit(f"other tokens after interrupt {turn}: {output.tolist()} for {expected.tolist()}")
        results = processor.results(output)
        if any(result.status not in ("complete", "truncated") for result in results):
            raise SystemExit(f"after interrupt {turn}: {results}")
    return count


if __name__ == "__main__":
    what, number, seed = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    run = interrupt_compilations if what == "compile" else interrupt_generation
    print(run(number, random.Random(seed)), "interrupted")
