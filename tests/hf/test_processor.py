"""GuidedLogitsProcessor called by hand: what it refuses at once, what it must put up with, and what it keeps."""

import copy
import pickle
import random
import threading
from typing import Any

import pytest
import torch

import gd_plugin as gd
from tests.fuzz import pick
from tests.hf.models import EOS, Kit, foreign_tokenizer, tiny_llama

YES_NO = gd.Guide.choice(["yes", "no"])


@pytest.fixture(scope="module")
def vocabulary() -> gd.Vocabulary:
    """All bytes, a few longer tokens, a stop token, and a width that is no multiple of 32."""
    tokens: list[bytes | None] = [bytes([byte]) for byte in range(256)]
    return gd.Vocabulary.from_bytes([*tokens, None, b"aa", b'"', b"ye"], stop_token_ids=[256], vocab_size=270)


STOP = 256
WIDTH = 270


def by_hand(vocabulary: gd.Vocabulary, guide: Any, **fields: Any) -> gd.GuidedLogitsProcessor:
    return gd.GuidedLogitsProcessor(guide, vocabulary=vocabulary, **fields)


def legal(out: torch.Tensor, row: int = 0) -> set[int]:
    return set((out[row] > float("-inf")).nonzero()[:, 0].tolist())


def call(processor: Any, rows: list[list[int]], width: int = WIDTH) -> torch.Tensor:
    return processor(torch.tensor(rows, dtype=torch.int64), torch.zeros(len(rows), width))


# ---- what is refused at construction

BAD_GUIDES: list[tuple[Any, type[Exception], str]] = [
    ("[0-9]+", TypeError, "Guide"),
    (b"x", TypeError, "bytes"),
    ({"type": "object"}, TypeError, "json_schema"),
    (7, TypeError, "int"),
    ([], ValueError, "empty"),
    ([None, "x"], TypeError, "guide 1"),
    ([YES_NO, {"type": "object"}], TypeError, "guide 1"),
    ({YES_NO}, TypeError, "set"),
    (iter([YES_NO]), TypeError, "list"),
]


@pytest.mark.parametrize(("guide", "error", "words"), BAD_GUIDES)
def test_what_is_no_guide_is_refused(vocabulary: gd.Vocabulary, guide: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        by_hand(vocabulary, guide)


BAD_OPTIONS: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"backend": "xgramar"}, ValueError, "xgrammar"),
    ({"backend": 3}, ValueError, "backend"),
    ({"on_dead_end": "ignore"}, ValueError, "stop"),
    ({"whitespaces": "any"}, TypeError, "whitespace"),
    ({"max_depth": -1}, ValueError, "max_depth"),
    ({"vocab_size": 10}, gd.VocabularyError, "270 tokens.*10 columns"),
    ({"vocab_size": 200}, gd.VocabularyError, "stop token 256"),
    ({"vocab_size": 0}, gd.VocabularyError, "columns"),
    ({"stop_token_ids": [9999]}, gd.VocabularyError, "9999"),
    ({"stop_token_ids": [-1]}, gd.VocabularyError, "-1"),
    *(
        ({"stop_token_ids": ids}, gd.VocabularyError, "stop_token_ids must be token ids")
        for ids in ([1.5], [1.0], "12", b"12", ["1"], True, [True], 1.5, [None], [[1]], torch.tensor([1.5]))
    ),
    *(({"max_new_tokens": number}, ValueError, "max_new_tokens must be") for number in (True, 0, -1, 2.5, "9")),
    *(({"vocab_size": size}, gd.VocabularyError, "vocab_size must be") for size in ("270", 270.0, True, [270])),
    *(
        ({"config": config}, TypeError, "config must be a GuidedDecodingConfig")
        for config in ({}, {"backend": "xgrammar"}, "xgrammar", gd.GuidedDecodingConfig)
    ),
    ({"tokenizer": object()}, TypeError, "not both"),
    ({"vocabulary": object()}, TypeError, "Vocabulary"),
    ({"vocabulary": None}, TypeError, "tokenizer="),
    ({"vocabulary": None, "tokenizer": object()}, gd.VocabularyError, "object"),
]


@pytest.mark.parametrize(("options", "error", "words"), BAD_OPTIONS)
def test_wrong_options_are_refused(
    vocabulary: gd.Vocabulary, options: dict[str, Any], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        gd.GuidedLogitsProcessor(YES_NO, **{"vocabulary": vocabulary, **options})


BROKEN: list[tuple[Any, type[Exception]]] = [
    (lambda: gd.Guide.ebnf("root ::= missing"), gd.InvalidGuideError),
    (lambda: gd.Guide.ebnf("root = "), gd.InvalidGuideError),
    (lambda: gd.Guide.ebnf('other ::= "a"'), gd.InvalidGuideError),
    (lambda: gd.Guide.regex("(ab"), gd.InvalidGuideError),
    (lambda: gd.Guide.json_schema('{"type":'), gd.InvalidGuideError),
    (lambda: gd.Guide.choice([]), gd.UnsatisfiableGuideError),
]


@pytest.mark.parametrize(("make", "error"), BROKEN)
def test_a_broken_guide_is_refused_before_the_first_step(
    vocabulary: gd.Vocabulary, make: Any, error: type[Exception]
) -> None:
    with pytest.raises(error) as caught:
        by_hand(vocabulary, make())
    assert len(str(caught.value)) > 20


def test_a_tokenizer_of_another_model_is_refused(kit: Kit) -> None:
    with pytest.raises(gd.VocabularyError, match=r"259 tokens.*49152 columns"):
        gd.GuidedLogitsProcessor(YES_NO, tokenizer=foreign_tokenizer(), model=kit.model)
    with pytest.raises(gd.VocabularyError, match="different models"):
        gd.GuidedLogitsProcessor(YES_NO, tokenizer=kit.tokenizer, model=kit.foreign[1])


def test_a_width_that_contradicts_the_model_is_refused(kit: Kit) -> None:
    with pytest.raises(gd.VocabularyError, match="49152"):
        gd.GuidedLogitsProcessor(YES_NO, tokenizer=kit.tokenizer, model=kit.model, vocab_size=50000)


def test_a_tokenizer_without_a_stop_token_is_refused() -> None:
    tokenizer = foreign_tokenizer()
    tokenizer.eos_token = None
    with pytest.raises(gd.VocabularyError, match="stop"):
        gd.GuidedLogitsProcessor(YES_NO, tokenizer=tokenizer)
    gd.GuidedLogitsProcessor(YES_NO, tokenizer=tokenizer, stop_token_ids=256)


WRONG_NUMBERS = [
    # guides, rows of distinct prompts, both numbers
    (3, [[1], [2]], "3 guides.*2"),
    (2, [[1], [2], [3]], "2 guides.*3"),
    (1, [[1], [2]], "1 guides.*2"),
    (2, [[1], [2], [3], [4]], "2 guides.*4"),
    (4, [[1], [1]], "4 guides.*2"),
]


@pytest.mark.parametrize(("num_guides", "rows", "words"), WRONG_NUMBERS)
def test_a_wrong_number_of_guides_names_both_numbers(
    vocabulary: gd.Vocabulary, num_guides: int, rows: list[list[int]], words: str
) -> None:
    processor = by_hand(vocabulary, [YES_NO] * num_guides)
    with pytest.raises(ValueError, match=words):
        call(processor, rows)


# ---- what a step is refused for

IDS, SCORES = torch.zeros((2, 3), dtype=torch.int64), torch.zeros(2, WIDTH)
BAD_STEPS: dict[str, tuple[Any, Any, type[Exception], str]] = {
    "ids of one dimension": (IDS[0], SCORES, ValueError, r"input_ids have shape \[3\]"),
    "ids of three dimensions": (IDS[None], SCORES, ValueError, r"input_ids have shape \[1, 2, 3\]"),
    "ids of none": (torch.tensor(1), SCORES, ValueError, r"input_ids have shape \[\]"),
    "scores of one dimension": (IDS, SCORES[0], ValueError, r"scores have shape \[270\]"),
    "scores of three dimensions": (IDS, SCORES[None], ValueError, r"scores have shape \[1, 2, 270\]"),
    "scores of none": (IDS, torch.tensor(1.0), ValueError, r"scores have shape \[\]"),
    "fewer ids": (IDS[:1], SCORES, ValueError, "input_ids have 1 rows but scores have 2"),
    "fewer scores": (IDS, SCORES[:1], ValueError, "input_ids have 2 rows but scores have 1"),
    "no ids": (IDS[:0], SCORES, ValueError, "input_ids have 0 rows but scores have 2"),
    "float ids": (IDS.float(), SCORES, TypeError, "input_ids are torch.float32"),
    "bool ids": (IDS.bool(), SCORES, TypeError, "input_ids are torch.bool"),
    "integer scores": (IDS, SCORES.long(), TypeError, "scores are torch.int64"),
    "bool scores": (IDS, SCORES.bool(), TypeError, "scores are torch.bool"),
    "complex scores": (IDS, SCORES.to(torch.complex64), TypeError, "scores are torch.complex64"),
    "a list of ids": (IDS.tolist(), SCORES, TypeError, "input_ids must be a tensor, got list"),
    "an array of ids": (IDS.numpy(), SCORES, TypeError, "input_ids must be a tensor, got ndarray"),
    "a list of scores": (IDS, SCORES.tolist(), TypeError, "scores must be a tensor, got list"),
    "an array of scores": (IDS, SCORES.numpy(), TypeError, "scores must be a tensor, got ndarray"),
    "no scores": (IDS, None, TypeError, "scores must be a tensor, got NoneType"),
}


@pytest.mark.parametrize("at", ["first", "later", "unguided"])
@pytest.mark.parametrize("case", BAD_STEPS)
def test_what_is_no_step_is_refused_and_leaves_no_trace(vocabulary: gd.Vocabulary, case: str, at: str) -> None:
    input_ids, scores, error, words = BAD_STEPS[case]
    processor = by_hand(vocabulary, None if at == "unguided" else YES_NO)
    if at == "later":
        call(processor, [[1], [2]])
    with pytest.raises(error, match=f"{words}; expected input_ids int64") as caught:
        processor(input_ids, scores)
    assert "scores float [rows, columns]" in str(caught.value)
    if at == "later":
        out = call(processor, [[1, ord("y")], [2, ord("n")]])
        assert (legal(out, 0), legal(out, 1)) == ({ord("e")}, {ord("o")})


# ---- what never raises


def test_illegal_tokens_never_raise(vocabulary: gd.Vocabulary) -> None:
    processor = by_hand(vocabulary, YES_NO)
    ids = [1]
    call(processor, [ids])
    for token in [ord("n"), 5, 99999, -1, STOP, ord("o"), STOP]:
        ids = [*ids, token]
        out = call(processor, [ids])
        assert legal(out), token
    assert legal(out) == {STOP}


def test_repeated_and_shrinking_prefixes_are_answered_alike(vocabulary: gd.Vocabulary) -> None:
    processor = by_hand(vocabulary, gd.Guide.regex("[a-c]{1,20}"))
    prompt = [7, 8, 9]
    tail = [ord(c) for c in "abcabcabc"]
    expected = [legal(call(processor, [prompt + tail[:n]])) for n in range(len(tail) + 1)]
    for n in [9, 9, 5, 6, 0, 0, 1, 9, 3]:
        if n == 9:
            for longer in range(10):
                call(processor, [prompt + tail[:longer]])
        assert legal(call(processor, [prompt + tail[:n]])) == expected[n]
    assert expected[0] == {ord("a"), ord("b"), ord("c"), 257}


def test_foreign_widths_pass_through_untouched(kit: Kit) -> None:
    processor = gd.GuidedLogitsProcessor(YES_NO, tokenizer=kit.tokenizer, model=kit.model)
    ids = torch.tensor([[1, 2]])
    for width in (305, 49151, 49153, 60000, 1):
        scores = torch.randn(1, width)
        assert processor(ids, scores) is scores
    out = processor(ids, torch.zeros(1, 49152))
    # a foreign call in between does not disturb the state
    processor(torch.tensor([[3]]), torch.zeros(1, 305))
    assert torch.equal(processor(ids, torch.zeros(1, 49152)), out)


@pytest.mark.parametrize("width", [WIDTH, WIDTH + 1, WIDTH + 33, 300, 1000, 260, 257])
def test_the_width_comes_from_the_scores(vocabulary: gd.Vocabulary, width: int) -> None:
    """Without a model the processor cannot know the width: it takes what comes, and bans what it does not know."""
    out = call(by_hand(vocabulary, YES_NO), [[1]], width)
    assert legal(out) == {token for token in (ord("y"), ord("n"), 259) if token < width}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("column", [None, ord("y"), ord("n")], ids=["all", "first legal", "last legal"])
def test_a_broken_models_scores_stay_broken(vocabulary: gd.Vocabulary, dtype: torch.dtype, column: int | None) -> None:
    """NaN is neither hidden nor let out of its row: samplers refuse it, and what is illegal stays banned."""
    processor = by_hand(vocabulary, YES_NO)
    scores = torch.zeros(2, WIDTH, dtype=dtype)
    scores[0, :] = float("-inf")
    scores[0, slice(None) if column is None else column] = float("nan")
    out = processor(torch.tensor([[1], [2]]), scores)
    start = {ord("y"), ord("n"), 259}
    assert set(out[0].isnan().nonzero()[:, 0].tolist()) == (start if column is None else {column})
    assert int(out[0].argmax()) in start and not (out[0] > float("-inf")).any()
    with pytest.raises(RuntimeError, match="nan"):
        out[0].float().softmax(dim=-1).multinomial(1)
    assert legal(out, 1) == start


def test_no_rows(vocabulary: gd.Vocabulary) -> None:
    out = by_hand(vocabulary, YES_NO)(torch.zeros((0, 3), dtype=torch.int64), torch.zeros(0, WIDTH))
    assert out.shape == (0, WIDTH)


def test_no_columns_of_ids(vocabulary: gd.Vocabulary) -> None:
    processor = by_hand(vocabulary, YES_NO)
    out = processor(torch.zeros((1, 0), dtype=torch.int64), torch.zeros(1, WIDTH))
    assert legal(out) == {ord("y"), ord("n"), 259}
    assert legal(call(processor, [[259]])) == {ord("s")}


# ---- state


def test_a_prompt_that_equals_the_last_output_continues_until_reset(vocabulary: gd.Vocabulary) -> None:
    processor = by_hand(vocabulary, YES_NO)
    call(processor, [[1]])
    call(processor, [[1, ord("y")]])
    assert legal(call(processor, [[1, ord("y"), ord("e")]])) == {ord("s")}
    assert legal(call(processor, [[1, ord("y"), ord("e")]])) == {ord("s")}
    processor.reset()
    assert legal(call(processor, [[1, ord("y"), ord("e")]])) == {ord("y"), ord("n"), 259}


def test_another_prompt_or_batch_is_another_call(vocabulary: gd.Vocabulary) -> None:
    processor = by_hand(vocabulary, YES_NO)
    start = {ord("y"), ord("n"), 259}
    call(processor, [[1]])
    assert legal(call(processor, [[1, ord("y")]])) == {ord("e")}
    for rows in ([[2, ord("y")]], [[1, ord("y"), 5, 6]], [[1], [1]], [[9]]):
        assert legal(call(processor, rows)) == start, rows


def test_iterating_yields_one_fresh_processor(vocabulary: gd.Vocabulary) -> None:
    processor = by_hand(vocabulary, YES_NO)
    assert len(processor) == 1
    [first], [second] = list(processor), list(processor)
    assert first is not second and first is not processor
    assert first.compiled is processor.compiled
    call(first, [[1]])
    assert legal(call(first, [[1, ord("n")]])) == {ord("o")}
    # a fresh child takes any prompt, also one that continues what another has seen
    assert legal(call(second, [[1, ord("n")]])) == {ord("y"), ord("n"), 259}
    assert processor.results()[0].text == ""
    call(first, [[1, ord("n"), ord("o")]])
    assert processor.results()[0].text == "no"


def test_processors_share_compiled_guides(vocabulary: gd.Vocabulary) -> None:
    guide = gd.Guide.regex("shared[0-9]")
    assert by_hand(vocabulary, guide).compiled[0] is by_hand(vocabulary, [None, guide]).compiled[1]


@pytest.mark.parametrize("how", ["copy", "deepcopy", "pickle"])
def test_a_copy_is_a_processor_of_its_own(vocabulary: gd.Vocabulary, how: str) -> None:
    make = {"copy": copy.copy, "deepcopy": copy.deepcopy, "pickle": lambda p: pickle.loads(pickle.dumps(p))}[how]
    processor = by_hand(vocabulary, [YES_NO, None], on_dead_end="raise")
    call(processor, [[1], [2]])
    call(processor, [[1, ord("y")], [2, 3]])
    twin = make(processor)
    assert twin.config == processor.config and twin.vocabulary.fingerprint == vocabulary.fingerprint
    with pytest.raises(RuntimeError, match="not been called"):
        twin.results()
    # it starts with any prompt, also one that the original would take for its next step
    assert legal(call(twin, [[1, ord("y")], [2, 3]])) == {ord("y"), ord("n"), 259}
    assert legal(call(processor, [[1, ord("y"), ord("e")], [2, 3, 4]])) == {ord("s")}
    assert [result.text for result in processor.results()] == ["ye", "\x03\x04"]
    assert [result.text for result in twin.results()] == ["", ""]
    assert len([*twin]) == 1 and twin(torch.zeros((0, 1), dtype=torch.int64), torch.zeros(0, WIDTH)).shape[0] == 0


def test_a_copied_call_is_guided(kit: Kit) -> None:
    """Programs deep-copy the arguments they keep for `generate`."""
    processor = gd.GuidedLogitsProcessor(YES_NO, tokenizer=kit.tokenizer, model=kit.model)
    kept = copy.deepcopy({"logits_processor": [processor], "max_new_tokens": 5})
    output = kit.model.generate(**kit.prompts(["Answer:"]), **kept)
    [twin] = kept["logits_processor"]
    assert twin.compiled[0] is processor.compiled[0]
    assert [result.text in ("yes", "no") for result in twin.results(output)] == [True]


def test_prompt_tokens_never_reach_a_matcher(vocabulary: gd.Vocabulary) -> None:
    for prompt in ([ord("y"), ord("e"), ord("s")], [STOP], [99999], [ord("y")]):
        assert legal(call(by_hand(vocabulary, YES_NO), [prompt])) == {ord("y"), ord("n"), 259}


# ---- memory


def count_nodes(processor: gd.GuidedLogitsProcessor) -> int:
    stack = [tree.root for tree in processor._session._trees]
    count = 0
    while stack:
        node = stack.pop()
        count += 1
        stack.extend(node.children.values())
    return count


def assert_bounded(processor: gd.GuidedLogitsProcessor, rows: int, length: int, window: int = 64) -> None:
    """Nodes of the live paths, and what a window can hold of everything else."""
    session = processor._session
    assert count_nodes(processor) <= rows * (length + 1) + 6 * rows * window
    assert session.num_matchers <= 4 * rows + 2
    assert session.pool.num_used <= 6 * rows * window + 2


STRING = gd.Guide.json_schema({"type": "string"})


def test_memory_of_a_long_greedy_call_is_the_path_and_a_window(vocabulary: gd.Vocabulary) -> None:
    processor = by_hand(vocabulary, STRING)
    steps = pick(20_000, 100_000)
    ids = torch.full((1, steps + 2), ord("a"), dtype=torch.int64)
    ids[0, 1] = ord('"')
    scores = torch.zeros(1, WIDTH)
    for length in range(1, steps + 1):
        processor(ids[:, :length], scores)
        if length % 5000 == 0:
            assert_bounded(processor, 1, length)
    assert processor._session.num_matchers == 1


def test_memory_with_drafts_and_beams(vocabulary: gd.Vocabulary) -> None:
    """Rows are reordered, and every few steps a draft of several tokens is taken back."""
    rng = random.Random(0)
    processor = by_hand(vocabulary, STRING)
    rows = [[1, ord('"')] for _ in range(4)]
    call(processor, [[1]] * 4)
    call(processor, rows)
    for step in range(pick(1000, 6000)):
        rows = [[*rng.choice(rows), rng.randrange(97, 123)] for _ in rows]
        out = call(processor, rows)
        assert all(ord("a") in legal(out, row) for row in range(4))
        if step % 5 == 0:
            draft = [list(row) for row in rows]
            for _ in range(rng.randrange(1, 8)):
                draft = [[*row, rng.randrange(97, 123)] for row in draft]
                call(processor, draft)
        if step % 500 == 499:
            assert_bounded(processor, 4, len(rows[0]))


def test_memory_over_many_calls(vocabulary: gd.Vocabulary) -> None:
    """Any number of calls of one processor keep the state of the last few."""
    processor = by_hand(vocabulary, YES_NO)
    for number in range(pick(1500, 20_000)):
        call(processor, [[number % 250]])
        call(processor, [[number % 250, ord("y")]])
    assert count_nodes(processor) <= 3
    assert [len(known) for known in processor._sessions.values()] == [16]


def test_a_processor_is_no_secret_keeper_of_models(kit: Kit) -> None:
    """The vocabulary cache does not keep a tokenizer alive, nor a processor its model."""
    import gc
    import weakref

    model = tiny_llama(seed=11, layers=1)
    processor = gd.GuidedLogitsProcessor(YES_NO, tokenizer=kit.tokenizer, model=model)
    watch = weakref.ref(model)
    del model
    gc.collect()
    assert watch() is None
    assert processor.vocabulary.vocab_size == 49152


def test_guides_travel_between_processes_as_text(vocabulary: gd.Vocabulary) -> None:
    guide = pickle.loads(pickle.dumps(STRING))
    assert by_hand(vocabulary, guide).compiled[0] is by_hand(vocabulary, STRING).compiled[0]


def test_stop_tokens_are_the_union_of_all_sources(kit: Kit) -> None:
    model = tiny_llama(seed=3, layers=1)
    model.generation_config.eos_token_id = [EOS, 5]
    model.config.eos_token_id = 7
    processor = gd.GuidedLogitsProcessor(YES_NO, tokenizer=kit.tokenizer, model=model, stop_token_ids=[9])
    assert processor.vocabulary.stop_token_ids == (2, 5, 7, 9)
    out = processor(torch.tensor([[1]]), torch.zeros(1, 49152))
    assert not legal(out) & {2, 5, 7, 9}
    out = processor(torch.tensor([[1, kit.tokenizer.convert_tokens_to_ids("yes")]]), torch.zeros(1, 49152))
    assert legal(out) == {2, 5, 7, 9}


# ---- one processor, several calls at a time

DIGITS = gd.Guide.regex("[0-9]{3}-[0-9]{2}")


def test_loops_in_turns_share_a_processor(vocabulary: gd.Vocabulary) -> None:
    processor = by_hand(vocabulary, DIGITS, max_new_tokens=7)
    generator = torch.Generator().manual_seed(0)
    # two of the same prompt
    loops = [[1, 2], [1, 2], [3, 1, 2]]
    starts = [len(ids) for ids in loops]
    for _ in range(7):
        for ids in loops:
            out = processor(torch.tensor([ids]), torch.randn(1, WIDTH, generator=generator))
            ids.append(int(out.argmax()))
    for ids, start in zip(loops, starts, strict=True):
        [result] = processor.results(torch.tensor([ids]))
        assert (result.status, result.num_tokens) == ("complete", 7)
        assert result.text == bytes(ids[start:-1]).decode()
    with pytest.raises(ValueError, match="prompts are not those"):
        processor.results(torch.tensor([[9, 9, 9]]))


def test_threads_share_a_processor(kit: Kit) -> None:
    processor = gd.GuidedLogitsProcessor(DIGITS, tokenizer=kit.tokenizer, model=kit.model)
    outputs: dict[str, Any] = {}

    def run(prompt: str) -> None:
        outputs[prompt] = kit.model.generate(**kit.prompts([prompt]), max_new_tokens=9, logits_processor=[processor])

    threads = [threading.Thread(target=run, args=(prompt,)) for prompt in ("a", "b", "one two", "Answer:")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [processor.results(output)[0].status for output in outputs.values()] == ["complete"] * 4
