"""What people have hit with guided decoding in `transformers`, each case named by its row: A the loop, B the vocabulary.

The number is the row's in the project's collection of public reports; the report follows in the docstring. Judges know
no engine: `re`, `json` with `jsonschema`, sets, torch. Rows about trees of drafts and stride bugs of kernels are tested
beside what they concern, here only as far as `generate` meets them.
"""

import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Sequence
from typing import Any

import jsonschema
import psutil
import pytest
import torch
from transformers import AutoTokenizer, LogitsProcessor, PreTrainedTokenizerFast, StoppingCriteria, StoppingCriteriaList

import gd_plugin as gd
from gd_plugin.grammars.backends.registry import backend_names
from tests.fuzz import pick
from tests.hf.models import EOS, PAD, Kit, foreign_tokenizer, tiny_llama
from tests.judges import CASES, SMALL_SCHEMA

SC = gd.Guide.json_schema(SMALL_SCHEMA)
IS_SC_PREFIX = next(case.is_prefix for case in CASES if case.name == "schema_object")
BOOLEAN = gd.Guide.json_schema({"type": "boolean"})
STRING = gd.Guide.json_schema({"type": "string"})
YES_NO = gd.Guide.choice(["yes", "no"])

# bytes by hand: token i is the byte i
STOP, OTHER_STOP = 256, 257
TABLE = gd.Vocabulary.from_bytes([*(bytes([byte]) for byte in range(256)), None, None], stop_token_ids=[256, 257])
# a prompt's token, which no test's guide allows
PROMPT = 1


class Puppet(LogitsProcessor):
    """Makes the model want to write the given tokens, one after another, and then nothing in particular."""

    def __init__(self, token_ids: Sequence[int]) -> None:
        self.token_ids = token_ids
        self.prompt_len: int | None = None

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        if self.prompt_len is None:
            self.prompt_len = input_ids.shape[1]
        step = input_ids.shape[1] - self.prompt_len
        scores = scores.clone()
        if step < len(self.token_ids):
            scores[:, self.token_ids[step]] += 1000.0
        return scores


def guided(kit: Kit, guide: Any, *, model: Any = None, **fields: Any) -> gd.GuidedLogitsProcessor:
    return gd.GuidedLogitsProcessor(
        guide, tokenizer=kit.tokenizer, model=kit.model if model is None else model, **fields
    )


def generate(
    kit: Kit, processor: Any, prompts: Sequence[str] = ("Answer:",), *, model: Any = None, **options: Any
) -> Any:
    model = kit.model if model is None else model
    torch.manual_seed(0)
    options = {"max_new_tokens": 24, "pad_token_id": PAD, **options}
    return model.generate(**kit.prompts(prompts), logits_processor=processor, **options)


def texts(kit: Kit, output: torch.Tensor, prompts: Sequence[str] = ("Answer:",)) -> list[str]:
    """Each row's text up to its stop token, by the tokenizer alone."""
    rows = output[:, kit.prompts(prompts)["input_ids"].shape[1] :].tolist()
    return [
        kit.tokenizer.decode(row[: row.index(EOS)] if EOS in row else row, clean_up_tokenization_spaces=False)
        for row in rows
    ]


def is_sc(text: str) -> bool:
    try:
        jsonschema.validate(json.loads(text), SMALL_SCHEMA)
    except (ValueError, jsonschema.ValidationError):
        return False
    return True


def check_sc(
    kit: Kit, output: torch.Tensor, results: list[gd.RowResult], prompts: Sequence[str] = ("Answer:",)
) -> None:
    """Whole texts match the schema, cut ones begin a match, and the results say which is which."""
    for text, result in zip(texts(kit, output, prompts), results, strict=True):
        assert result.text == text
        assert result.status == ("complete" if is_sc(text) else "truncated"), text
        assert is_sc(text) or IS_SC_PREFIX(text), text


def by_hand(guide: Any, **fields: Any) -> gd.GuidedLogitsProcessor:
    return gd.GuidedLogitsProcessor(guide, vocabulary=TABLE, **fields)


def legal(processor: Any, *rows: Sequence[int]) -> list[set[int]]:
    """One call of the processor behind the prompt; the legal tokens of each row."""
    ids = torch.tensor([[PROMPT, *row] for row in rows], dtype=torch.int64)
    out = processor(ids, torch.zeros(len(rows), TABLE.vocab_size))
    return [set((row > float("-inf")).nonzero()[:, 0].tolist()) for row in out]


# ---- A: the generation loop


@pytest.mark.parametrize("early_stopping", [False, True, "never"])
def test_a01_beams_follow_their_own_histories(kit: Kit, early_stopping: Any) -> None:
    """xgrammar #681: rows are reordered between steps."""
    processor = guided(kit, SC)
    output = generate(kit, [processor], num_beams=3, num_return_sequences=3, early_stopping=early_stopping)
    check_sc(kit, output, processor.results(output))
    assert len({tuple(row) for row in output.tolist()}) == 3


@pytest.mark.parametrize("as_list", [False, True])
def test_a02_a_processor_serves_any_number_of_calls(kit: Kit, as_list: bool) -> None:
    """transformers-CFG #49: the second prompt has another length."""
    used = guided(kit, SC)
    for prompt in ("Answer:", "A much longer question, to be answered in JSON:", "Q"):
        output = generate(kit, [used] if as_list else used, [prompt])
        assert torch.equal(output, generate(kit, guided(kit, SC), [prompt]))
        check_sc(kit, output, used.results(output), [prompt])


def test_a03_a_guide_per_prompt_with_left_padding(kit: Kit) -> None:
    """xgrammar PR #275."""
    prompts = ["a", "a considerably longer prompt:"]
    processor = guided(kit, [SC, gd.Guide.regex("[0-9]{4}")])
    for options in ({}, {"num_beams": 2}, {"do_sample": True, "num_return_sequences": 2}):
        output = generate(kit, processor, prompts, **options)
        found = texts(kit, output, prompts)
        half = len(found) // 2
        assert all(is_sc(text) or IS_SC_PREFIX(text) for text in found[:half])
        assert all(re.fullmatch("[0-9]{4}", text) for text in found[half:])


@pytest.mark.parametrize("num_guides", [1, 3])
def test_a03_a_wrong_number_of_guides_is_refused_before_the_first_step(kit: Kit, num_guides: int) -> None:
    steps: list[int] = []
    with pytest.raises(ValueError, match=rf"{num_guides} guides.*2"):
        generate(
            kit,
            [guided(kit, [YES_NO] * num_guides)],
            ["a", "b"],
            stopping_criteria=StoppingCriteriaList([_Count(steps)]),
        )
    assert not steps


class _Count(StoppingCriteria):
    def __init__(self, steps: list[int]) -> None:
        self.steps = steps

    def __call__(self, input_ids: torch.LongTensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        self.steps.append(input_ids.shape[1])
        return torch.zeros(len(input_ids), dtype=torch.bool)


def test_a04_an_unguided_row_is_left_alone(kit: Kit) -> None:
    """vLLM PR #22896: a mask row of zeros where there should be none."""
    prompts = ["a", "b"]
    mixed = generate(kit, guided(kit, [SC, None]), prompts, output_scores=True, return_dict_in_generate=True)
    plain = generate(kit, None, prompts, output_scores=True, return_dict_in_generate=True)
    # the first row ends on its own, so the second one's steps are compared
    for ours, theirs in zip(mixed.scores, plain.scores, strict=False):
        assert torch.equal(ours[1], theirs[1])
    assert torch.equal(mixed.sequences[1], plain.sequences[1])


@pytest.mark.parametrize("how", ["assistant", "prompt_lookup"])
def test_a06_assisted_equals_greedy(kit: Kit, how: str) -> None:
    """transformers #48390: several new tokens, fewer tokens, and drafts the guide rejects."""
    options = {"assistant": {"assistant_model": kit.draft}, "prompt_lookup": {"prompt_lookup_num_tokens": 3}}[how]
    prompt = 'Like {"n": 22, "ok": true} and {"n": 22, "ok": false}:'
    processor = guided(kit, SC)
    output = generate(kit, [processor], [prompt], **options)
    plain = generate(kit, guided(kit, SC), [prompt])
    assert texts(kit, output, [prompt]) == texts(kit, plain, [prompt])
    check_sc(kit, output, processor.results(output), [prompt])


@pytest.mark.parametrize("backend", backend_names())
def test_a07_a_rejected_draft_is_taken_back(backend: str, caplog: Any, capfd: Any) -> None:
    """vLLM #44006: a draft [1, 2, X, 3] whose X is illegal."""
    processor = by_hand(gd.Guide.regex("[0-9]{2,6}"), backend=backend)
    digits = set(b"0123456789")
    draft = [ord("1"), ord("2"), ord("x"), ord("3")]
    assert legal(processor, []) == [digits]
    for end in range(1, 5):
        allowed = legal(processor, draft[:end])[0]
        # behind the rejected token a row may say anything but nothing at all
        assert allowed == [digits, digits | {STOP, OTHER_STOP}][end - 1] if end < 3 else allowed
    # the target has kept two drafts and chosen another token
    assert legal(processor, [*draft[:2], ord("9")]) == [digits | {STOP, OTHER_STOP}]
    assert legal(processor, draft[:1]) == [digits]
    assert not caplog.records and not capfd.readouterr().err


@pytest.mark.parametrize("backend", backend_names())
def test_a08_back_across_the_stop_token(backend: str) -> None:
    """vLLM PR #46272: engines disagree whether a stop token counts; for every way back the mask is what it was."""
    tokens = [*b"[12,3]", STOP]
    processor = by_hand(gd.Guide.regex(r"\[[0-9]+(?:,[0-9]+){0,3}\]"), backend=backend)
    seen = [legal(processor, tokens[:end])[0] for end in range(len(tokens) + 1)]
    assert seen[-2] == {STOP, OTHER_STOP} and seen[-1] <= {STOP, OTHER_STOP} and seen[-1]
    for start in range(len(tokens) + 1):
        for end in range(len(tokens) + 1):
            legal(processor, tokens[:start])
            assert legal(processor, tokens[:end])[0] == seen[end], (start, end)


def test_a09_branches_of_one_prefix() -> None:
    """TensorRT-LLM #18892: each branch has its own mask, also where rows swap branches."""
    processor = by_hand(gd.Guide.regex("a(?:b[0-9]|c[x-z])"))
    b, c = [ord("a"), ord("b")], [ord("a"), ord("c")]
    legal(processor, [], [])
    legal(processor, [ord("a")], [ord("a")])
    for _ in range(2):
        assert legal(processor, b, c) == [set(b"0123456789"), set(b"xyz")]
        assert legal(processor, c, b) == [set(b"xyz"), set(b"0123456789")]


def test_a11_the_prompt_is_no_part_of_the_text(kit: Kit) -> None:
    """outlines PR #926: no ids at all in the first call; and a prompt that begins like an answer."""
    prompt = ['Answer like {"n": 1, "ok": true} with {"n":']
    plain = generate(kit, guided(kit, SC), prompt)
    check_sc(kit, plain, guided_results(kit, plain, prompt), prompt)
    inputs = kit.prompts(prompt)
    embeds = kit.model.get_input_embeddings()(inputs["input_ids"])
    for options in ({}, {"num_beams": 3}):
        processor = guided(kit, SC)
        output = kit.model.generate(
            inputs_embeds=embeds,
            attention_mask=inputs["attention_mask"],
            max_new_tokens=24,
            pad_token_id=PAD,
            logits_processor=[processor],
            **options,
        )
        if not options:
            assert torch.equal(output, plain[:, inputs["input_ids"].shape[1] :])
        [result] = processor.results(output)
        assert is_sc(result.text or "") or IS_SC_PREFIX(result.text or "")


def guided_results(kit: Kit, output: torch.Tensor, prompts: Sequence[str]) -> list[gd.RowResult]:
    """Results of a processor that has made the same call."""
    processor = guided(kit, SC)
    assert torch.equal(generate(kit, processor, prompts), output)
    return processor.results(output)


@pytest.mark.parametrize("options", [{}, {"do_sample": True}, {"num_beams": 3}], ids=["greedy", "sample", "beams"])
def test_a13_min_new_tokens_cannot_outlast_the_guide(kit: Kit, options: dict[str, Any]) -> None:
    """vLLM #53665: every legal token is banned before the guide sees the scores; never NaN, never token 0."""
    text = '{"n": 22, "ok": false}'
    puppet = Puppet(kit.tokenizer.encode(text))
    processor = guided(kit, SC)
    with pytest.warns(UserWarning, match="min_new_tokens"):
        output = generate(kit, [puppet, processor], min_new_tokens=30, max_new_tokens=40, **options)
    [result] = processor.results(output)
    assert (result.status, result.text) == ("complete", text)


DEAD_AT_ONCE = 'root ::= "a" dead\ndead ::= [^\\u0000-\\U0010FFFF]'


@pytest.mark.parametrize("policy", ["stop", "raise", "release"])
@pytest.mark.parametrize("options", [{}, {"do_sample": True}, {"num_beams": 2}], ids=["greedy", "sample", "beams"])
def test_a14_a_dead_end_is_a_named_error(kit: Kit, policy: str, options: dict[str, Any]) -> None:
    """transformers #15169: a row of -inf reaches softmax."""
    # "z" would do, but the model wants "q", and nothing spells what must follow
    guide = gd.Guide.regex("q\x04|z")
    options = {**options, "sequence_bias": {(0,): 1000.0}}
    table = gd.Vocabulary.from_bytes([b"q", None, b"z"], stop_token_ids=[1])
    model = tiny_llama(3, layers=1)
    model.generation_config.eos_token_id = model.config.eos_token_id = 1
    model.generation_config.bos_token_id = model.generation_config.pad_token_id = None
    processor = gd.GuidedLogitsProcessor(guide, vocabulary=table, model=model, on_dead_end=policy)
    call = {"input_ids": torch.tensor([[2, 2]]), "attention_mask": torch.ones(1, 2, dtype=torch.int64), **options}
    if policy == "raise":
        with pytest.raises(gd.DeadEndError) as caught:
            model.generate(**call, max_new_tokens=4, pad_token_id=1, logits_processor=processor)
        error: Any = caught.value
    else:
        output = model.generate(**call, max_new_tokens=4, pad_token_id=1, logits_processor=processor)
        [result] = processor.results(output)
        assert (result.status, result.text) == ("dead_end", "q")
        assert output[0, 2] == 0
        if policy == "stop":
            assert set(output[0, 3:].tolist()) == {1}
        error = result.error
    assert isinstance(error, gd.DeadEndError)
    assert (error.num_tokens, error.text) == (1, "q") and "on_dead_end" in str(error)


def test_a14_a_guide_that_is_dead_at_once_is_refused_or_reported(kit: Kit) -> None:
    try:
        processor = guided(kit, gd.Guide.ebnf(DEAD_AT_ONCE))
    except gd.GuideError as error:
        assert "dead" in str(error) or error.pointer is not None
        return
    output = generate(kit, processor, do_sample=True, max_new_tokens=6)
    [result] = processor.results(output)
    assert result.status == "dead_end" and isinstance(result.error, gd.DeadEndError)


@pytest.mark.parametrize("options", [{}, {"do_sample": True}, {"num_beams": 3}], ids=["greedy", "sample", "beams"])
def test_a15_nothing_follows_a_whole_text(kit: Kit, options: dict[str, Any]) -> None:
    """vLLM #29632: rows that end early are padded until the last one ends."""
    prompts = ["a", "b"]
    processor = guided(kit, [BOOLEAN, gd.Guide.regex("[a-z]{40}")])
    output = generate(kit, processor, prompts, max_new_tokens=30, **options)
    rows = output[:, kit.prompts(prompts)["input_ids"].shape[1] :].tolist()
    assert texts(kit, output, prompts)[0] in ("true", "false")
    # beams that have ended may go on as running ones, by stop tokens alone
    assert set(rows[0][rows[0].index(EOS) + 1 :]) <= ({PAD, EOS} if "num_beams" in options else {PAD})
    assert [result.status for result in processor.results(output)] == ["complete", "complete"] or rows[1][-1] != EOS


def test_a16_every_stop_token_is_banned_inside_and_legal_at_the_end(kit: Kit) -> None:
    """vLLM #52146: the tokenizer's, the config's, the generation config's and the caller's."""
    model = tiny_llama(seed=3, layers=1)
    model.generation_config.eos_token_id = [EOS, 0]
    model.config.eos_token_id = 7
    newline = kit.tokenizer.convert_tokens_to_ids("Ċ")
    stops = {EOS, 0, 7, newline}
    processor = guided(kit, STRING, model=model, stop_token_ids=[newline])
    quote = kit.tokenizer.convert_tokens_to_ids('"')
    for generated, expected in (([quote], set()), ([quote, quote], stops)):
        processor(torch.tensor([[PROMPT]]), torch.zeros(1, 49152))
        for end in range(1, len(generated) + 1):
            out = processor(torch.tensor([[PROMPT, *generated[:end]]]), torch.zeros(1, 49152))
        allowed = set((out[0] > float("-inf")).nonzero()[:, 0].tolist())
        assert allowed & stops == expected
        assert not expected or allowed == expected
    output = generate(kit, processor, model=model, do_sample=True, eos_token_id=[EOS, 0, 7, newline], pad_token_id=9)
    [result] = processor.results(output)
    if result.status == "complete":
        assert isinstance(json.loads(result.text or ""), str)
    else:
        assert output.shape[1] == kit.prompts(["Answer:"])["input_ids"].shape[1] + 24


@pytest.mark.parametrize("backend", ["auto", *backend_names()])
def test_a19_special_tokens_are_no_text(kit: Kit, backend: str) -> None:
    """sglang #3108: decoding without special tokens would give a text that no longer matches."""
    guide = gd.Guide.regex('"[ -!#-~]{0,9}"')
    processor = guided(kit, guide, backend=backend)
    special = [token for token, added in kit.tokenizer.added_tokens_decoder.items() if added.special]
    assert len(special) == 17
    bias = {"sequence_bias": {(token,): 500.0 for token in special if token != EOS}}
    output = generate(kit, processor, do_sample=True, **bias)
    row = output[0, kit.prompts(["Answer:"])["input_ids"].shape[1] :].tolist()
    text = kit.tokenizer.decode(row, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    assert not set(row) & set(special) - {EOS, PAD}
    assert re.fullmatch('"[ -!#-~]{0,9}"', text), text


def test_a21_a_cut_text_is_reported_as_cut(kit: Kit) -> None:
    """vLLM #8350."""
    processor = guided(kit, SC)
    output = generate(kit, [Puppet(kit.tokenizer.encode('{"n": 22, "ok": false}')), processor], max_new_tokens=4)
    [result] = processor.results(output)
    assert (result.status, result.num_tokens, result.final) == ("truncated", 4, True)
    assert result.text == texts(kit, output)[0] and IS_SC_PREFIX(result.text or "")


WHITESPACE: list[tuple[str, dict[str, Any], int]] = [
    ("default", {}, 16),
    ("two", {"max_whitespace": 2}, 2),
    ("compact", {"whitespace": "compact"}, 0),
]
TWO_KEYS = {
    "type": "object",
    "properties": {"name": {"type": "boolean"}, "ok": {"type": "boolean"}},
    "required": ["name", "ok"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("backend", ["auto", "xgrammar", "llguidance"])
@pytest.mark.parametrize(("name", "fields", "most"), WHITESPACE, ids=[row[0] for row in WHITESPACE])
def test_a22_white_space_cannot_loop(kit: Kit, backend: str, name: str, fields: dict[str, Any], most: int) -> None:
    """vLLM #4093: a model that likes line ends and blanks writes nothing else up to the limit."""
    blank = {piece: token for piece, token in kit.tokenizer.get_vocab().items() if piece and not piece.strip("ĠĊĉč")}
    bias = {"sequence_bias": {(token,): 50.0 for token in blank.values()}}
    for guide in [gd.Guide.json_schema(TWO_KEYS), *([SC] if backend == "auto" else [])]:
        processor = guided(kit, guide, backend=backend, **fields)
        # beside white space there is little to write, except for numbers that may be followed by zeros
        spelled = Puppet([]) if guide != SC else _NoZeros(kit)
        output = generate(kit, [spelled, processor], max_new_tokens=64 if most <= 2 else 250, **bias)
        [text], [result] = texts(kit, output), processor.results(output)
        assert result.status == "complete", text
        assert json.loads(text) and text == text.strip()
        runs = [len(run) for run in re.findall(r"[ \n\t\r]+", text)]
        assert max(runs, default=0) <= most
        assert most == 0 or len(runs) >= 5, "the model was not tempted"


class _NoZeros(LogitsProcessor):
    """Makes 1 the only number worth writing."""

    def __init__(self, kit: Kit) -> None:
        vocabulary = kit.tokenizer.get_vocab()
        self.unwanted = [token for piece, token in vocabulary.items() if re.search(r"[0.eE+\\]", piece)]

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        scores = scores.clone()
        scores[:, self.unwanted] -= 60.0
        return scores


@pytest.mark.parametrize("backend", ["xgrammar", "llguidance"])
@pytest.mark.parametrize(("name", "fields", "most"), WHITESPACE, ids=[row[0] for row in WHITESPACE])
def test_a22_the_setting_means_the_same_everywhere(backend: str, name: str, fields: dict[str, Any], most: int) -> None:
    factory = gd.GrammarMatcherFactory(TABLE, config=gd.GuidedDecodingConfig(backend=backend, **fields))
    matcher = factory.create(gd.Guide.json_schema(TWO_KEYS))
    for before, after in (
        ("{", '"name":true,"ok":true}'),
        ('{"name":', 'true,"ok":true}'),
        ('{"name":true,', '"ok":true}'),
    ):
        for blank in " \n\t\r":
            for count in (0, 1, 2, 3, 15, 16, 17, 400):
                text = before.encode() + blank.encode() * count + after.encode()
                accepted = matcher.validate_tokens([*text, STOP]) == len(text) + 1
                assert accepted == (count <= most), (before, blank, count)
    for text in (' {"name":true,"ok":true}', '{"name":true,"ok":true} '):
        assert matcher.validate_tokens([*text.encode(), STOP]) < len(text) + 1


MARKERS: list[tuple[str, list[str], int | None]] = [
    # pieces to be written, one token each where the vocabulary has it; limit of the free text
    ("text", ["Let me think {.", "</think>", "{"], None),
    ("split over tokens", ["Hm ", "<", "/", "t", "h", "i", "n", "k", ">", "{"], None),
    ("never thinks", ["</think>", "{"], None),
    ("never closes", ["and so on "] * 30, 12),
    ("looks like the marker", ["</thin", "</think", "</think>", "{"], None),
]


@pytest.mark.parametrize(("name", "pieces", "limit"), MARKERS, ids=[row[0] for row in MARKERS])
def test_a23_free_text_and_then_the_guide(kit: Kit, name: str, pieces: list[str], limit: int | None) -> None:
    """vLLM #18255: the grammar begins with the token behind the marker, however that is spelled."""
    wanted = [token for piece in pieces for token in kit.tokenizer.encode(piece)]
    processor = guided(kit, BOOLEAN.with_reasoning(max_tokens=limit))
    output = generate(kit, [Puppet(wanted), processor], ["Think. <think>"], max_new_tokens=60)
    [text], [result] = texts(kit, output, ["Think. <think>"]), processor.results(output)
    thought, marker, answer = text.partition("</think>")
    assert marker and result.status == "complete" and result.text == text
    assert answer in ("true", "false")
    assert limit is not None or thought == "".join(pieces[:-1]).partition("</think>")[0]


def test_a23_the_limit_is_reached_inside_the_reasoning(kit: Kit) -> None:
    processor = guided(kit, BOOLEAN.with_reasoning())
    output = generate(kit, [Puppet(kit.tokenizer.encode("and so on " * 20)), processor], max_new_tokens=12)
    [result] = processor.results(output)
    assert (result.status, result.num_tokens) == ("truncated", 12)
    assert result.text == texts(kit, output)[0]


TAGS = [
    {"type": "tag", "begin": f"<fn={name}>", "content": {"type": "json_schema", "json_schema": schema}, "end": "</fn>"}
    for name, schema in (
        ("add", {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}),
        ("neg", {"type": "object", "properties": {"b": {"type": "null"}}, "required": ["b"]}),
    )
]
SHAPES: dict[str, Any] = {
    "format": {"type": "structural_tag", "format": {"type": "triggered_tags", "triggers": ["<fn="], "tags": TAGS}},
    "triggers": {
        "structures": [
            {"begin": tag["begin"], "schema": tag["content"]["json_schema"], "end": tag["end"]}  # type: ignore[index]
            for tag in TAGS
        ],
        "triggers": ["<fn="],
    },
}


@pytest.mark.parametrize("backend", backend_names())
@pytest.mark.parametrize("shape", SHAPES)
def test_a24_tool_calls_obey_their_schemas(kit: Kit, shape: str, backend: str) -> None:
    """vLLM #55152: both shapes are enforced, or refused by name when the processor is built; never unguided."""
    try:
        processor = guided(kit, gd.Guide.structural_tag(SHAPES[shape]), backend=backend, whitespace="compact")
    except gd.UnsupportedGuideError as error:
        assert backend == "outlines_core" and backend in str(error)
        return
    # free text, a name that is not there, a call with another tool's arguments, and then the end
    wanted = 'Well, {[ <fn=add>{"b":null}</fn> and <fn=sub>{"a":true}</fn>'
    output = generate(kit, [Puppet([*kit.tokenizer.encode(wanted), EOS]), processor], max_new_tokens=80)
    [text], [result] = texts(kit, output), processor.results(output)
    assert text.startswith('Well, {[ <fn=add>{"a":') and result.text == text
    calls = re.findall(r"<fn=(\w+)>(.*?)</fn>", text)
    assert calls, text
    for name, arguments in calls:
        schema = {"add": TAGS[0], "neg": TAGS[1]}[name]["content"]["json_schema"]  # type: ignore[index]
        jsonschema.validate(json.loads(arguments), schema)
    assert not re.search(r"<fn=(?!add>|neg>|$)", text)


# ---- B: vocabularies, masks, devices


@pytest.mark.parametrize("more", [1, 79, 400])
@pytest.mark.parametrize("knows_model", [True, False])
def test_b27_columns_behind_the_tokenizer_are_banned(kit: Kit, more: int, knows_model: bool) -> None:
    """xgrammar PR #694: the width is that of the scores."""
    width = 49152 + more
    model = tiny_llama(width, layers=1)
    processor = gd.GuidedLogitsProcessor(SC, tokenizer=kit.tokenizer, model=model if knows_model else None)
    out = processor(torch.tensor([[PROMPT]]), torch.zeros(1, width))
    assert out.shape == (1, width) and torch.isinf(out[0, 49152:]).all() and torch.isfinite(out).any()
    # a model that wants nothing but its padding
    bias = {"sequence_bias": {(token,): 500.0 for token in range(49152, width)}}
    output = generate(kit, processor, model=model, do_sample=True, **bias)
    assert int(output.max()) < 49152
    check_sc(kit, output, processor.results(output))


@pytest.mark.parametrize("width", [258, 259, 286, 287, 288, 289, 320, 49152, 49153, 49170])
@pytest.mark.parametrize("backend", backend_names())
def test_b29_bits_behind_the_width_mean_nothing(width: int, backend: str) -> None:
    """xgrammar PR #220: SmolLM2's 49,152 columns hide it."""
    tokens = [bytes([byte]) for byte in range(256)]
    table = gd.Vocabulary.from_bytes([*tokens, None], stop_token_ids=[256], vocab_size=width)
    matcher = gd.GrammarMatcherFactory(table, backend=backend).create(gd.Guide.regex(r"[ -~]{1,9}"))
    bitmask = torch.full((3, (width + 31) // 32 + 1), -1, dtype=torch.int32)
    matcher.fill_next_token_bitmask(bitmask, 1)
    assert (bitmask[[0, 2]] == -1).all(), "another row was written"
    bits = [(int(bitmask[1, column >> 5]) >> (column & 31)) & 1 for column in range(32 * bitmask.shape[1])]
    assert not any(bits[256:]) and sum(bits) == 95
    # and the logits' last columns: nothing is read or written behind them
    scores = torch.zeros(2, 2 * width)[:, :width]
    out = gd.GuidedLogitsProcessor(gd.Guide.regex(r"[ -~]{1,9}"), vocabulary=table, backend=backend)(
        torch.tensor([[1], [2]]), scores
    )
    assert [int(n) for n in (out > float("-inf")).sum(dim=1)] == [95, 95]


EMOJI = {
    "range": gd.Guide.regex("[😀-🙏]{2}"),
    "joined": gd.Guide.choice(["👩‍🚀"]),
    "accent": gd.Guide.regex(r"(?:né){3}"),
}


@pytest.mark.parametrize("name", EMOJI)
@pytest.mark.parametrize("backend", backend_names())
def test_b31_characters_of_several_tokens(kit: Kit, name: str, backend: str) -> None:
    """outlines #725: wherever the limit falls, the text holds whole characters."""
    judge = {"range": "[😀-🙏]{2}", "joined": "👩\u200d🚀", "accent": "(?:né){3}"}[name]
    processor = guided(kit, EMOJI[name], backend=backend)
    whole = generate(kit, processor, do_sample=True, max_new_tokens=20)
    [result] = processor.results(whole)
    assert result.status == "complete" and re.fullmatch(judge, result.text or "")
    start = kit.prompts(["Answer:"])["input_ids"].shape[1]
    for end in range(start, whole.shape[1]):
        [cut] = processor.results(whole[:, :end])
        assert "\ufffd" not in (cut.text or "") and (result.text or "").startswith(cut.text or "")


def test_b31_a_byte_without_a_token_is_found_when_asked(kit: Kit) -> None:
    """SmolLM2 lacks tokens for 21 byte values, 0x04 among them."""
    report = gd.lint(gd.Guide.choice(["\x04"]), tokenizer=kit.tokenizer)
    assert not report.ok and report.problems
    assert gd.lint(gd.Guide.choice(["\x03x", "y"]), tokenizer=kit.tokenizer).ok


def decoder_of(tokenizer: Any) -> Any:
    return json.loads(tokenizer.backend_tokenizer.to_str())["decoder"]


def test_b32_the_decoder_decides_not_the_class(tmp_path: Any) -> None:
    """transformers-CFG #63: byte-level tokens saved under the class of a SentencePiece model."""
    tokenizer = foreign_tokenizer()
    tokenizer.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({**config, "tokenizer_class": "LlamaTokenizerFast"}))
    plain = gd.Vocabulary.from_tokenizer(tokenizer)
    assert gd.Vocabulary.from_tokenizer(PreTrainedTokenizerFast.from_pretrained(tmp_path)).tokens == plain.tokens
    # some versions of transformers (5.19) put the class's own decoder into what they read
    if decoder_of(AutoTokenizer.from_pretrained(tmp_path)) == decoder_of(tokenizer):
        assert gd.Vocabulary.from_tokenizer(str(tmp_path)).tokens == plain.tokens
    assert plain.token_bytes(tokenizer.convert_tokens_to_ids("Ġ")) == b" "
    as_class = AutoTokenizer.from_pretrained(tmp_path)
    # whatever that class makes of the file: what it decodes, or an error; never another table
    try:
        table = gd.Vocabulary.from_tokenizer(as_class)
    except gd.VocabularyError as error:
        assert len(str(error)) > 20
    else:
        # in the middle of a document, that is behind other text
        first = as_class.decode([65, 33])
        assert table.decode([65, 33]).decode("utf-8", "replace").strip() == first.strip()


def test_b32_sentencepiece_pieces() -> None:
    """llguidance and xgrammar on `▁`: the first token of `yes` is not `▁yes`, and `<0x79>` is a `y`; no bos token."""
    from tokenizers import Tokenizer, decoders
    from tokenizers.models import BPE

    pieces = ["<unk>", "</s>", "▁yes", "yes", "▁", "<0x79>", "es", "y", "no"]
    model = Tokenizer(BPE(vocab={piece: i for i, piece in enumerate(pieces)}, merges=[], unk_token="<unk>"))
    model.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=model, eos_token="</s>", unk_token="<unk>")
    assert tokenizer.bos_token is None
    for guide, expected in ((YES_NO, {"yes", "<0x79>", "y", "no"}), (gd.Guide.choice([" yes"]), {"▁yes", "▁"})):
        processor = gd.GuidedLogitsProcessor(guide, tokenizer=tokenizer)
        out = processor(torch.tensor([[0]]), torch.zeros(1, len(pieces)))
        assert {pieces[i] for i in (out[0] > float("-inf")).nonzero()[:, 0].tolist()} == expected


@pytest.mark.parametrize("name", ["bf16", "fp16"])
def test_b34_models_of_half_precision(kit: Kit, name: str) -> None:
    """xgrammar PR #469."""
    model = getattr(kit, name)
    for options in ({}, {"do_sample": True}, {"num_beams": 2}):
        processor = guided(kit, SC, model=model)
        output = generate(kit, processor, model=model, **options)
        check_sc(kit, output, processor.results(output))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("rows", [0, 1, 3])
@pytest.mark.parametrize("layout", ["contiguous", "wide rows", "every other column", "transposed", "expanded"])
def test_b34_any_layout_of_scores(dtype: torch.dtype, rows: int, layout: str) -> None:
    """xgrammar PR #394: strides were swapped. The result is what masked_fill makes of the same columns."""
    width = TABLE.vocab_size
    values = torch.randn(rows, width).to(dtype)
    scores = {
        "contiguous": lambda: values.clone(),
        "wide rows": lambda: torch.zeros(rows, 2 * width, dtype=dtype)[:, :width].copy_(values),
        "every other column": lambda: torch.zeros(rows, 2 * width, dtype=dtype)[:, ::2].copy_(values),
        "transposed": lambda: values.t().contiguous().t(),
        "expanded": lambda: values[:1].expand(rows, width),
    }[layout]()
    before = scores.clone()
    out = by_hand(YES_NO)(torch.arange(rows)[:, None], scores)
    banned = torch.ones(width, dtype=torch.bool)
    banned[[ord("y"), ord("n")]] = False
    assert out.dtype == dtype and torch.equal(out, before.masked_fill(banned, float("-inf")))
    assert torch.equal(scores, before)


def test_b35_nothing_is_tied_to_a_device(kit: Kit) -> None:
    """The mask follows the scores. Without a GPU: two devices' worth of calls on one processor, and no Triton at all."""
    devices = ["cpu", *(f"cuda:{index}" for index in range(torch.cuda.device_count()))]
    processor = guided(kit, SC)
    found = [processor(torch.tensor([[PROMPT]], device=d), torch.zeros(1, 49152, device=d)).cpu() for d in devices]
    assert all(torch.equal(out, found[0]) for out in found)
    script = (
        "import sys; sys.modules['triton'] = None\n"
        "import torch, gd_plugin as gd\n"
        "table = gd.Vocabulary.from_bytes([b'a', b'b', None], stop_token_ids=[2])\n"
        "p = gd.GuidedLogitsProcessor(gd.Guide.regex('a+'), vocabulary=table)\n"
        "print(p(torch.tensor([[1]]), torch.zeros(1, 3)).tolist())\n"
    )
    assert run_python(script) == "[[0.0, -inf, -inf]]"


def run_python(script: str, *flags: str) -> str:
    """Run a script in an interpreter of its own and return what it prints."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run(
        [sys.executable, *flags, "-c", script],
        capture_output=True,
        text=True,
        env=environment,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_b37_nothing_depends_on_assert() -> None:
    """outlines PR #1923: under `python -O` the same errors, and an illegal token is still illegal."""
    script = (
        "import torch, gd_plugin as gd\n"
        "assert False, 'python runs with -O'\n"
        "table = gd.Vocabulary.from_bytes([b'a', b'b', None], stop_token_ids=[2])\n"
        "p = gd.GuidedLogitsProcessor(gd.Guide.regex('ab'), vocabulary=table)\n"
        "rows = [p(torch.tensor([[1, *ids]]), torch.zeros(1, 3)).tolist()[0] for ids in ([], [1], [1, 0])]\n"
        "matcher = p.compiled[0].create_matcher()\n"
        "found = [rows == [[0.0, -float('inf'), -float('inf')]] + 2 * [[-float('inf'), -float('inf'), 0.0]],\n"
        "         p.results()[0].status, matcher.accept_token(1), matcher.accept_token(0)]\n"
        "for wrong in (lambda: gd.Guide.regex('('), lambda: matcher.rollback(5), lambda: matcher.rollback(-1),\n"
        "              lambda: gd.GuidedLogitsProcessor([], vocabulary=table),\n"
        "              lambda: matcher.fill_next_token_bitmask(torch.zeros(1, 1), 0)):\n"
        "    try: wrong(); found.append('nothing raised')\n"
        "    except ValueError as error: found.append(type(error).__name__)\n"
        "print(found)\n"
    )
    errors = ["InvalidGuideError", "RollbackError", "RollbackError", "ValueError", "ValueError"]
    assert run_python(script, "-O") == str([True, "truncated", False, True, *errors])


@pytest.mark.parametrize("backend", backend_names())
def test_b39_threads_share_the_grammar_and_nothing_else(backend: str) -> None:
    """xgrammar #213: eight threads, one compile, the same masks as one after another."""
    guide = gd.Guide.regex(f"(?:{backend}|[0-9]{{3}}-[a-z]{{2,8}})")
    processor = by_hand(guide, backend=backend)
    text = [*b"123-abcdef", STOP]

    def run() -> list[set[int]]:
        [child] = processor
        return [legal(child, text[:end])[0] for end in range(len(text) + 1)]

    expected = run()
    barrier = threading.Barrier(8)
    found: list[Any] = [None] * 8
    compiled: list[Any] = [None] * 8
    new = gd.Guide.regex(f"{backend}[a-z]{{3}}")

    def work(number: int) -> None:
        barrier.wait()
        compiled[number] = by_hand(new, backend=backend).compiled[0]
        found[number] = [run() for _ in range(pick(4, 100))]

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(grammar is compiled[0] for grammar in compiled)
    assert all(masks == expected for runs in found for masks in runs)


def test_b40_the_cache_does_not_grow() -> None:
    """GHSA-389x-67px-mjg3: thousands of different enums."""
    limit = 1 << 20
    factory = gd.GrammarMatcherFactory(TABLE, config=gd.GuidedDecodingConfig(cache_bytes=limit))
    compiled_bytes, resident = 0, []
    for number in range(3000):
        compiled_bytes += factory.compile(gd.Guide.choice([f"{number} {n}" for n in range(8)])).nbytes
        info = factory.cache_info()
        assert info.bytes <= limit
        if number % 1000 == 999:
            resident.append(psutil.Process().memory_info().rss)
    assert compiled_bytes > 5 * limit, "too little was compiled to show anything"
    assert resident[-1] - resident[0] < 16 << 20
    assert info.entries > 0
    factory.clear_cache()
    assert factory.cache_info().entries == 0
