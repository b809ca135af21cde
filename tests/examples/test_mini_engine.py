"""The mini engine's greedy output equals `model.generate` with GuidedLogitsProcessor, however requests arrive."""

import importlib.util
import random
import sys
from pathlib import Path

import pytest
import torch
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

import gd_plugin as gd

PATH = Path(__file__).parents[2] / "examples" / "mini_engine.py"
STOP, WIDTH, MAX_NEW_TOKENS = 60, 64, 12


@pytest.fixture(scope="module")
def engine_module():
    spec = importlib.util.spec_from_file_location("mini_engine", PATH)
    module = importlib.util.module_from_spec(spec)
    sys.modules["mini_engine"] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules["mini_engine"]


def tiny_model(seed):
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=WIDTH,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        eos_token_id=STOP,
        pad_token_id=0,
        bos_token_id=1,
        initializer_range=0.3,
    )
    model = LlamaForCausalLM(config).double().eval()
    model.generation_config = GenerationConfig(eos_token_id=STOP, pad_token_id=0)
    return model


@pytest.fixture(scope="module")
def models():
    return tiny_model(0), tiny_model(1)


@pytest.fixture(scope="module")
def vocabulary():
    texts = [
        *'{}[]":, abcdefghijklmnopqrstuvwxyz0123456789-.',
        '{"',
        '":',
        '",',
        "true",
        "false",
        "null",
        "ab",
        "12",
    ]
    tokens = [text.encode() for text in texts]
    return gd.Vocabulary.from_bytes(tokens, stop_token_ids=[STOP], vocab_size=WIDTH)


GUIDES = [
    gd.Guide.json(),
    gd.Guide.regex("[a-f]{3,9}-[0-9]+"),
    None,
    gd.Guide.choice(["yes", "no", "maybe"]),
    gd.Guide.json_schema({"type": "array", "items": {"type": "integer"}, "maxItems": 4}),
    gd.Guide.json(root="object"),
]


@pytest.fixture(scope="module")
def expected(models, vocabulary):
    """(prompt, guide, output of generate) of each request, one at a time."""
    rng, wanted = random.Random(5), []
    for guide in GUIDES:
        prompt = [rng.randrange(2, 54) for _ in range(rng.randint(1, 23))]
        processors = [] if guide is None else [gd.GuidedLogitsProcessor(guide, model=models[0], vocabulary=vocabulary)]
        ids = torch.tensor([prompt])
        out = models[0].generate(
            ids,
            attention_mask=torch.ones_like(ids),
            logits_processor=processors,
            do_sample=False,
            max_new_tokens=MAX_NEW_TOKENS,
        )
        wanted.append((prompt, guide, out[0, len(prompt) :].tolist()))
    return wanted


def noise(seed):
    """A drafter whose proposals are mostly illegal, placeholders among them, and sometimes right."""
    rng = random.Random(seed)
    return lambda tokens, num_tokens: [rng.choice([*tokens[-6:], rng.randrange(-1, 60)]) for _ in range(num_tokens)]


WAYS = {
    "plain": {},
    "one slot": {"num_slots": 1},
    "prompt lookup": {"num_drafts": 4, "drafter": "lookup"},
    "the guide": {"num_drafts": 8, "drafter": "guide"},
    "noise": {"num_drafts": 3, "drafter": "noise"},
    "an oracle": {"num_drafts": 4, "drafter": "oracle"},
    "a draft model": {"num_drafts": 3, "draft_model": "other"},
    "itself as draft model": {"num_drafts": 3, "draft_model": "same"},
}


def build(engine_module, models, vocabulary, expected, way, rows="repeat"):
    options = dict(WAYS[way])
    known = {tuple(prompt): output for prompt, _, output in expected}

    def oracle(tokens, num_tokens):
        for prompt, output in known.items():
            whole = [*prompt, *output]
            if tokens[: len(prompt)] == list(prompt):
                return whole[len(tokens) : len(tokens) + num_tokens]
        return []

    drafters = {"lookup": engine_module.prompt_lookup, "noise": noise(3), "oracle": oracle, "guide": "guide"}
    if "drafter" in options:
        options["drafter"] = drafters[options["drafter"]]
    if "draft_model" in options:
        options["draft_model"] = models[0] if options["draft_model"] == "same" else models[1]
    config = gd.GuidedDecodingConfig(rows_behind_refused_draft=rows)
    return engine_module.MiniEngine(models[0], vocabulary, chunk_tokens=7, config=config, **{"num_slots": 3} | options)


def gap(models, prompt, output, wanted):
    """How close the two tokens were where the outputs part: a near tie may flip, a gap may not."""
    position = next((i for i, pair in enumerate(zip(output, wanted, strict=False)) if pair[0] != pair[1]), None)
    if position is None:
        return f"lengths {len(output)} and {len(wanted)}"
    with torch.no_grad():
        logits = models[0](torch.tensor([prompt + wanted[:position]])).logits[0, -1]
    return f"token {position}: {output[position]} against {wanted[position]}, logit gap " + str(
        float(logits[wanted[position]] - logits[output[position]])
    )


@pytest.mark.parametrize(("seed", "way"), enumerate(WAYS))
def test_greedy_output_equals_generate(engine_module, models, vocabulary, expected, way, seed):
    rng = random.Random(seed)
    engine = build(engine_module, models, vocabulary, expected, way, rows=["repeat", "open"][seed % 2])
    order = rng.sample(range(len(expected)), len(expected))
    requests = {}
    while order or engine.waiting or any(engine.slots):
        if order and rng.random() < 0.5:
            index = order.pop()
            prompt, guide, _ = expected[index]
            requests[index] = engine.add(engine_module.Request(list(prompt), guide, MAX_NEW_TOKENS))
        if rng.random() < 0.15:
            engine.preempt(rng.randrange(len(engine.slots)))
        engine.step()
    for index, request in requests.items():
        prompt, _, wanted = expected[index]
        assert request.error is None
        assert request.output == wanted, gap(models, prompt, request.output, wanted)


def test_drafts_save_steps(engine_module, models, vocabulary, expected):
    steps = {}
    for way in ("plain", "an oracle"):
        engine = build(engine_module, models, vocabulary, expected, way)
        for prompt, guide, _ in expected:
            engine.add(engine_module.Request(list(prompt), guide, MAX_NEW_TOKENS))
        steps[way] = 0
        while engine.waiting or any(engine.slots):
            engine.step()
            steps[way] += 1
    assert steps["an oracle"] < 0.6 * steps["plain"]


def test_sampling_obeys_the_guide(engine_module, models, vocabulary, expected):
    engine = build(engine_module, models, vocabulary, expected, "prompt lookup")
    guide = gd.Guide.choice(["yes", "no", "maybe"])
    requests = [engine.add(engine_module.Request([5, 6], guide, 9, 1.0, seed)) for seed in range(12)]
    engine.run()
    texts = {vocabulary.decode(request.output) for request in requests}
    assert texts <= {b"yes", b"no", b"maybe"} and len(texts) > 1
    assert all(request.output[-1] == STOP for request in requests)


def test_a_bad_guide_ends_its_request_alone(engine_module, models, vocabulary, expected):
    engine = build(engine_module, models, vocabulary, expected, "prompt lookup")
    prompt, guide, wanted = expected[0]
    bad = engine.add(engine_module.Request([3], gd.Guide(gd.GuideType.EBNF_GRAMMAR, "root ::= nowhere"), 9))
    good = engine.add(engine_module.Request(list(prompt), guide, MAX_NEW_TOKENS))
    engine.run()
    assert bad.finished and "nowhere" in bad.error
    assert good.output == wanted


# the real model ---------------------------------------------------------------------------------------------------

PERSON = gd.Guide.json_schema(
    {
        "type": "object",
        "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
        "required": ["name", "age"],
    }
)
REAL_REQUESTS = [  # question, guide, tokens at most
    ("Ann is 31. Answer in JSON with name and age:", PERSON, 20),
    ("Is water wet? yes or no:", gd.Guide.choice(["yes", "no"]), 4),
    ("One, two, three, one, two,", None, 6),
    ("The year of the first moon landing:", gd.Guide.regex("(19|20)[0-9]{2}"), 6),
]


@pytest.fixture(scope="module")
def real(smollm2_tokenizer):
    """SmolLM2 in float64, its vocabulary, and (prompt, guide, output of generate) of each request."""
    from gd_plugin.testing.real_model import smollm2_folder

    model = LlamaForCausalLM.from_pretrained(smollm2_folder()).double().eval()
    vocabulary = gd.Vocabulary.from_tokenizer(smollm2_tokenizer, vocab_size=model.config.vocab_size)
    wanted = []
    for question, guide, max_new_tokens in REAL_REQUESTS:
        ids = smollm2_tokenizer(question, return_tensors="pt").input_ids
        processors = [] if guide is None else [gd.GuidedLogitsProcessor(guide, model=model, vocabulary=vocabulary)]
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            logits_processor=processors,
            do_sample=False,
            max_new_tokens=max_new_tokens,
            pad_token_id=0,
        )
        wanted.append((ids[0].tolist(), guide, out[0, ids.shape[1] :].tolist()))
    return model, vocabulary, wanted


@pytest.mark.slow
@pytest.mark.parametrize("num_drafts", [0, 3])
def test_a_real_models_output_equals_generate(engine_module, real, num_drafts):
    model, vocabulary, wanted = real
    engine = engine_module.MiniEngine(
        model, vocabulary, num_slots=2, num_drafts=num_drafts, drafter=engine_module.prompt_lookup
    )
    limits = [limit for _, _, limit in REAL_REQUESTS]
    requests = [
        engine.add(engine_module.Request(list(prompt), guide, limit))
        for (prompt, guide, _), limit in zip(wanted, limits, strict=True)
    ]
    engine.run()
    for request, (prompt, _, output) in zip(requests, wanted, strict=True):
        assert request.error is None
        assert request.output == output, gap((model,), prompt, request.output, output)
