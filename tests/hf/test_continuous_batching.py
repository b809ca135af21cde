"""Continuous batching: each request obeys its own guide, whatever else is in the batch, and nothing else changes."""

import random
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from transformers import ContinuousBatchingConfig, GenerationConfig
from transformers.generation.continuous_batching import requests as cb_requests
from transformers.generation.continuous_batching.requests import RequestState

import gd_plugin as gd
from tests.hf.models import EOS, PAD, Kit, tiny_llama
from tests.judges import CASES, Case

CASE = {case.name: case for case in CASES}
TOKENS = 10


@pytest.fixture(scope="module")
def model() -> Any:
    """A model of its own: continuous batching switches its attention back and forth."""
    return tiny_llama(seed=3, layers=1)


@pytest.fixture
def ready(model: Any, kit: Kit) -> Iterator[Any]:
    with gd.hf.enable_continuous_batching(model, tokenizer=kit.tokenizer) as enabled:
        assert enabled is model
        yield model


def settings(**fields: Any) -> dict[str, Any]:
    """Few, small blocks: the default cache would fill the machine."""
    small = {"page_size": 16, "num_blocks": 64, "max_batch_tokens": 64, "use_async_batching": False}
    return {"continuous_batching_config": ContinuousBatchingConfig(**{**small, **fields})}


def config(**fields: Any) -> GenerationConfig:
    return GenerationConfig(**{"do_sample": False, "eos_token_id": EOS, "pad_token_id": PAD, **fields})


def prompt(kit: Kit, text: str) -> list[int]:
    ids: list[int] = kit.tokenizer(text)["input_ids"]
    return ids


def collect(manager: Any, count: int) -> dict[str, Any]:
    results: dict[str, Any] = {}
    for _ in range(600):
        result = manager.get_result(timeout=0.1)
        if result is not None and result.is_finished():
            results[result.request_id] = result
        if len(results) == count:
            return results
    raise AssertionError(f"{sorted(results)}: {len(results)} of {count} requests have come back")


def alone(kit: Kit, model: Any, ids: list[int], guide: gd.Guide | None, tokens: int = TOKENS) -> list[int]:
    """What generate says to one prompt, without continuous batching."""
    processor = None if guide is None else gd.GuidedLogitsProcessor(guide, tokenizer=kit.tokenizer, model=model)
    inputs = torch.tensor([ids])
    output = model.generate(
        input_ids=inputs,
        attention_mask=torch.ones_like(inputs),
        generation_config=config(max_new_tokens=tokens),
        logits_processor=processor,
    )
    row: list[int] = output[0, len(ids) :].tolist()
    return row


def check(case: Case, kit: Kit, tokens: list[int]) -> None:
    text = gd.Vocabulary.from_tokenizer(kit.tokenizer).decode(tokens[:-1] if tokens[-1] == EOS else tokens)
    if tokens[-1] == EOS:
        assert case.is_complete(text.decode()), text
    else:
        assert len(tokens) == TOKENS
        assert case.is_prefix(text.decode(errors="ignore")), text


def test_64_requests_with_random_arrivals_equal_one_by_one(kit: Kit, ready: Any) -> None:
    rng = random.Random(0)
    kinds = [*CASES, None, None]
    jobs: list[tuple[list[int], Case | None]] = []
    for number in range(64):
        words = " ".join(rng.choice(["one", "two", "red", "blue", "{", '"n":']) for _ in range(rng.randint(1, 40)))
        jobs.append((prompt(kit, f"{number} {words}"), rng.choice(kinds)))
    expected = [alone(kit, ready, ids, case and case.guide) for ids, case in jobs]
    with ready.continuous_batching_context_manager(
        generation_config=config(), **settings(max_batch_tokens=128, num_blocks=128)
    ) as manager:
        results: dict[str, Any] = {}
        for number, (ids, case) in enumerate(jobs):
            guide = None if case is None else case.guide.to_json()
            manager.add_request(ids, request_id=f"job{number}", max_new_tokens=TOKENS, guide=guide)
            for _ in range(rng.choice([0, 0, 1, 4])):
                result = manager.get_result(timeout=0.005)
                if result is not None:
                    results[result.request_id] = result
        results |= collect(manager, 64 - len(results))
    for number, ((_, case), tokens) in enumerate(zip(jobs, expected, strict=True)):
        result = results[f"job{number}"]
        assert result.error is None
        assert result.generated_tokens == tokens, (number, case)
        if case is not None:
            check(case, kit, tokens)


def test_a_request_put_back_under_cache_pressure_goes_on_where_it_was(kit: Kit, ready: Any) -> None:
    manager = ready.init_continuous_batching(generation_config=config(), **settings())
    processor = next(p for p in manager.logit_processor.logits_processor if type(p).__name__ == "_GuideProcessor")
    tokens = prompt(kit, "123-ab")
    state = RequestState("a", [7, 8, 9], max_new_tokens=20, logit_processor_kwargs={"guide": regex_text()})
    rows = []
    for count in range(len(tokens) + 1):
        state.generated_tokens = tokens[len(state.initial_tokens) - 3 : count]
        if count in (2, 4):  # twice: the second time its prompt holds generated tokens already
            state = state.create_equivalent_initial_request()
            assert state._true_initial_tokens == 3
        rows.append(mask_of(processor, state))
    matcher = gd.GrammarMatcherFactory(processor._vocabulary).create(gd.Guide.from_json(regex_text()))
    for token_id, row in zip([*tokens, None], rows, strict=True):
        expected = gd.allocate_token_bitmask(1, 49152)
        matcher.fill_next_token_bitmask(expected, 0)
        assert torch.equal(row, expected[0])
        assert token_id is None or matcher.accept_token(token_id)


def regex_text() -> str:
    return CASE["regex"].guide.to_json()


def mask_of(processor: Any, state: RequestState) -> torch.Tensor:
    request = cb_requests.FutureRequestState(state, has_new_token=True, complete_blocks={}, query_length=1)
    assert processor.prepare_tensor_args([request]).tolist() == [0]
    row: torch.Tensor = processor._bitmask[0].clone()
    return row


def test_forks_go_their_own_ways(kit: Kit, ready: Any) -> None:
    case = CASE["regex"]
    torch.manual_seed(0)
    sampling = config(do_sample=True, temperature=4.0, top_k=0, num_return_sequences=6)
    with ready.continuous_batching_context_manager(generation_config=sampling, **settings()) as manager:
        for number in range(2):
            manager.add_request(prompt(kit, "Answer:"), request_id=str(number), max_new_tokens=TOKENS, guide=case.guide)
        results = collect(manager, 12)
    outputs = [tuple(result.generated_tokens) for result in results.values()]
    assert len(set(outputs)) > 6
    for tokens in outputs:
        check(case, kit, list(tokens))


def test_generate_batch_takes_a_guide_for_all_or_one_each(kit: Kit, ready: Any) -> None:
    inputs = [prompt(kit, "Answer:"), prompt(kit, "A longer question, please:"), prompt(kit, "Third")]
    cases = [CASE["choice"], None, CASE["schema_object"]]
    guides = [case and case.guide for case in cases]
    options: Any = {"generation_config": config(max_new_tokens=TOKENS), **settings()}
    results = ready.generate_batch(inputs, guide=guides, **options)
    expected = [alone(kit, ready, ids, guide) for ids, guide in zip(inputs, guides, strict=True)]
    assert [result.generated_tokens for result in results.values()] == expected
    same = ready.generate_batch(inputs, guide=CASE["choice"].guide, **options)
    for result in same.values():
        check(CASE["choice"], kit, result.generated_tokens)


def test_batches_of_two_threads_keep_their_guides(kit: Kit, model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    meet = threading.Barrier(2, timeout=60)
    init = type(model).init_continuous_batching

    def init_together(*arguments: Any, **options: Any) -> Any:
        meet.wait()  # by now both threads have said which guides they want
        return init(*arguments, **options)

    monkeypatch.setattr(type(model), "init_continuous_batching", init_together)
    wanted = {"a": CASE["choice"], "b": CASE["regex"]}
    results: dict[str, Any] = {}

    def run(name: str) -> None:
        options: Any = {"generation_config": config(max_new_tokens=TOKENS), **settings()}
        results[name] = model.generate_batch([prompt(kit, name)] * 2, guide=wanted[name].guide, **options)

    with gd.hf.enable_continuous_batching(model, tokenizer=kit.tokenizer):
        threads = [threading.Thread(target=run, args=(name,)) for name in wanted]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    for name, case in wanted.items():
        for result in results[name].values():
            check(case, kit, result.generated_tokens)


def test_one_failing_request_fails_alone(kit: Kit, ready: Any) -> None:
    ids = prompt(kit, "Answer:")
    case = CASE["choice"]
    with ready.continuous_batching_context_manager(generation_config=config(), **settings()) as manager:
        manager.add_request(ids, request_id="broken", guide='{"json_schema": {"type": "nothing"}}')
        manager.add_request(ids, request_id="no json", guide="{")
        manager.add_request(ids, request_id="number", guide=5)
        manager.add_request(ids, request_id="unknown", guided=case.guide.to_json())
        manager.add_request(ids, request_id="good", max_new_tokens=TOKENS, guide=case.guide.to_json())
        manager.add_request(ids, request_id="plain", max_new_tokens=TOKENS)
        results = collect(manager, 6)
    for name, word in {"broken": "type", "no json": "JSON", "number": "Guide", "unknown": "guided"}.items():
        assert word in results[name].error
    assert results["good"].generated_tokens == alone(kit, ready, ids, case.guide)
    assert results["plain"].generated_tokens == alone(kit, ready, ids, None)


def test_a_dead_end_and_an_engine_failure_end_their_request_alone(kit: Kit, model: Any) -> None:
    from gd_plugin.grammars.backends import xgrammar

    # no token of this vocabulary spells the byte behind "ab", and the model does not want the other text
    tokens = list(gd.Vocabulary.from_tokenizer(kit.tokenizer).tokens)
    vocabulary = gd.Vocabulary.from_bytes(
        [None if token and b"7" in token else token for token in tokens], stop_token_ids=[EOS]
    )
    ids = prompt(kit, "Answer:")
    calls = {"fills": 0}
    fill = xgrammar.XGrammarMatcher._engine_fill

    def failing(matcher: Any, *arguments: Any) -> None:
        calls["fills"] += 1
        if matcher._engine_forced_text().startswith(b"broken"):
            raise gd.MatcherError("the engine gave up")
        fill(matcher, *arguments)

    with (
        pytest.MonkeyPatch.context() as patch,
        gd.hf.enable_continuous_batching(model, vocabulary=vocabulary),
        model.continuous_batching_context_manager(generation_config=config(), **settings()) as manager,
    ):
        patch.setattr(xgrammar.XGrammarMatcher, "_engine_fill", failing)
        manager.add_request(ids, request_id="dead", max_new_tokens=TOKENS, guide=gd.Guide.regex("ab7c|%"))
        manager.add_request(ids, request_id="engine", max_new_tokens=TOKENS, guide=gd.Guide.regex("broken"))
        manager.add_request(ids, request_id="good", max_new_tokens=TOKENS, guide=CASE["choice"].guide)
        results = collect(manager, 3)
    assert calls["fills"] >= 3
    assert "DeadEndError" in results["dead"].error
    assert len(results["dead"].generated_tokens) <= 3
    assert "the engine gave up" in results["engine"].error
    assert results["good"].error is None
    check(CASE["choice"], kit, results["good"].generated_tokens)


def test_the_guide_stands_before_the_samplers_and_behind_the_rest(kit: Kit, ready: Any) -> None:
    # min_new_tokens bans the stop token where the guide wants nothing else: the guide wins, as in generate
    hot = config(do_sample=True, temperature=2.0, top_k=20, top_p=0.9, min_new_tokens=12)
    cb = settings(per_request_processors=True)
    with ready.continuous_batching_context_manager(generation_config=hot, **cb) as manager:
        names = [type(processor).__name__ for processor in manager.logit_processor.logits_processor]
        for number in range(8):
            manager.add_request(
                prompt(kit, str(number)),
                request_id=str(number),
                max_new_tokens=TOKENS,
                temperature=0.5 + number,
                guide=CASE["choice"].guide,
            )
        results = collect(manager, 8)
    place = names.index("_GuideProcessor")
    assert all("Warper" not in name for name in names[:place])
    assert all("Warper" in name for name in names[place + 1 :])
    for result in results.values():
        assert result.error is None
        check(CASE["choice"], kit, result.generated_tokens)


def test_a_manager_alone_and_the_way_back(kit: Kit, model: Any) -> None:
    names = set(vars(model))
    manager = model.init_continuous_batching(generation_config=config(), **settings())
    before = (list(manager.logit_processor.logits_processor), manager.logit_processor.tensors_required)
    ids = prompt(kit, "Answer:")
    with gd.hf.enable_continuous_batching(manager, tokenizer=kit.tokenizer) as same:
        assert same is manager
        with pytest.raises(RuntimeError, match="already"):
            gd.hf.enable_continuous_batching(manager, tokenizer=kit.tokenizer).__enter__()
        manager.start()
        with pytest.raises(RuntimeError, match="before start"):
            other = model.init_continuous_batching(generation_config=config(), **settings())
            other.batch_processor = manager.batch_processor or object()
            gd.hf.enable_continuous_batching(other, tokenizer=kit.tokenizer).__enter__()
        manager.add_request(ids, request_id="a", max_new_tokens=TOKENS, guide=CASE["choice"].guide)
        check(CASE["choice"], kit, collect(manager, 1)["a"].generated_tokens)
        manager.stop(block=True)
    after = (list(manager.logit_processor.logits_processor), manager.logit_processor.tensors_required)
    assert before == after
    assert "add_request" not in vars(manager)
    assert set(vars(model)) == names
    with gd.hf.enable_continuous_batching(model, tokenizer=kit.tokenizer):
        assert "init_continuous_batching" in vars(model)
    assert set(vars(model)) == names


@pytest.mark.parametrize("fields", [{"use_async_batching": True}, {"use_cuda_graph": True}], ids=str)
def test_what_runs_ahead_of_its_tokens_is_refused(kit: Kit, ready: Any, fields: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(fields))):
        ready.init_continuous_batching(generation_config=config(), **settings(**fields))


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda kit, model: gd.hf.enable_continuous_batching(object(), tokenizer=kit.tokenizer), TypeError, "object"),
        (lambda kit, model: gd.hf.enable_continuous_batching(model), TypeError, "tokenizer"),
        (lambda kit, model: gd.hf.enable_continuous_batching(model, vocabulary=7), TypeError, "Vocabulary"),
    ],
    ids=["not a model", "no tokenizer", "no vocabulary"],
)
def test_wrong_arguments_are_refused(
    kit: Kit, model: Any, call: Callable[..., Any], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        call(kit, model).__enter__()
    assert "init_continuous_batching" not in vars(model)


def test_a_dropped_processor_does_not_go_unnoticed(kit: Kit, ready: Any) -> None:
    processor = gd.GuidedLogitsProcessor(CASE["choice"].guide, tokenizer=kit.tokenizer, model=ready)
    with pytest.raises(TypeError, match="guide="):
        ready.generate_batch([prompt(kit, "A")], logits_processor=[processor])
