"""What is read from a model and a tokenizer: width, stop tokens, options in the way, and what does not fit together."""

import gc
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import GenerationConfig, LlamaConfig

import gd_plugin as gd
from gd_plugin.hf import model_facts
from tests.hf.models import EOS, FORCED_BOS, Kit, foreign_tokenizer, tiny_llama

TOKENS: list[bytes | None] = [bytes([byte]) for byte in range(64)]


def vocabulary(**fields: Any) -> gd.Vocabulary:
    return gd.Vocabulary.from_bytes(TOKENS, **{"stop_token_ids": [0], **fields})


# ---- width

WIDTHS: list[tuple[str, Any, int | None]] = [
    ("head", lambda: tiny_llama(300, layers=1), 300),
    # a checkpoint's config may lag behind a resized head
    ("resized head", lambda: resized(300, 333), 333),
    ("config alone", lambda: SimpleNamespace(config=LlamaConfig(vocab_size=77)), 77),
    ("nested config", lambda: SimpleNamespace(config=multimodal_config(78)), 78),
    (
        "quantised head",
        lambda: SimpleNamespace(config=LlamaConfig(vocab_size=79), get_output_embeddings=packed_head),
        79,
    ),
    ("no head", lambda: SimpleNamespace(config=LlamaConfig(vocab_size=80), get_output_embeddings=lambda: None), 80),
    ("nothing", lambda: SimpleNamespace(), None),
]


def resized(before: int, after: int) -> Any:
    model = tiny_llama(before, layers=1)
    model.resize_token_embeddings(after)
    model.config.vocab_size = before
    return model


def multimodal_config(vocab_size: int) -> Any:
    text = LlamaConfig(vocab_size=vocab_size)
    return SimpleNamespace(vocab_size=1, get_text_config=lambda: text)


def packed_head() -> Any:
    return SimpleNamespace(weight=torch.zeros(17))


@pytest.mark.parametrize(("name", "make", "width"), WIDTHS, ids=[row[0] for row in WIDTHS])
def test_width(name: str, make: Any, width: int | None) -> None:
    assert model_facts.model_width(make()) == width


# ---- stop tokens


def test_stop_tokens_are_a_union_whatever_their_form(kit: Kit) -> None:
    model = SimpleNamespace(
        config=LlamaConfig(vocab_size=49152, eos_token_id=[4, 5]), generation_config=GenerationConfig(eos_token_id=6)
    )
    for more in (None, 7, [7, 8], (8,)):
        found = model_facts.resolve_vocabulary(kit.tokenizer, model, None, None, more)
        added = {7} if more == 7 else set(more or ())
        assert set(found.stop_token_ids) == {EOS, 4, 5, 6, *added}


def test_finished_rows_are_offered_what_generate_knows() -> None:
    """A row must end for `generate` too, so ids that only the tokenizer calls a stop are not offered alone."""
    table = vocabulary(stop_token_ids=[1, 2, 3])
    model = SimpleNamespace(generation_config=GenerationConfig(eos_token_id=[3, 99]))
    assert model_facts.generation_stop_ids(model, table) == (3,)
    for silent in (None, SimpleNamespace(), SimpleNamespace(generation_config=GenerationConfig(eos_token_id=99))):
        assert model_facts.generation_stop_ids(silent, table) == (1, 2, 3)


# ---- one vocabulary a tokenizer and width


def test_vocabularies_are_shared_and_follow_added_tokens() -> None:
    tokenizer = foreign_tokenizer()
    model = SimpleNamespace(config=LlamaConfig(vocab_size=300))
    first = model_facts.resolve_vocabulary(tokenizer, model, None, None, None)
    assert model_facts.resolve_vocabulary(tokenizer, model, None, None, None) is first
    assert model_facts.resolve_vocabulary(tokenizer, None, None, None, None).vocab_size == 259
    tokenizer.add_tokens(["zebra"])
    grown = model_facts.resolve_vocabulary(tokenizer, model, None, None, None)
    assert (first.token_bytes(259), grown.token_bytes(259)) == (b"", b"zebra")


def test_a_tokenizer_given_as_text_has_no_known_size() -> None:
    tokenizer = foreign_tokenizer()
    text = tokenizer.backend_tokenizer.to_str()
    known = model_facts.resolve_vocabulary(text, None, None, 300, tokenizer.eos_token_id)
    assert (known.vocab_size, known.tokens[:256]) == (
        300,
        gd.Vocabulary.from_tokenizer(tokenizer).tokens[:256],
    )


def test_no_tokenizer_is_kept_alive() -> None:
    tokenizer = foreign_tokenizer()
    model_facts.resolve_vocabulary(tokenizer, None, None, None, None)
    watch = weakref.ref(tokenizer)
    del tokenizer
    gc.collect()
    assert watch() is None


def test_a_multimodal_processor_stands_for_its_tokenizer() -> None:
    tokenizer = foreign_tokenizer()
    found = model_facts.resolve_vocabulary(SimpleNamespace(tokenizer=tokenizer), None, None, None, None)
    assert found is model_facts.resolve_vocabulary(tokenizer, None, None, None, None)


def test_a_ready_vocabulary_takes_the_model_s_width_and_stop_tokens() -> None:
    table = vocabulary()
    model = SimpleNamespace(config=LlamaConfig(vocab_size=70, eos_token_id=5))
    found = model_facts.resolve_vocabulary(None, model, table, None, None)
    assert (found.vocab_size, found.stop_token_ids) == (70, (0, 5))
    assert found.token_bytes(33) == b"!" and found.token_bytes(69) == b""
    same = SimpleNamespace(config=LlamaConfig(vocab_size=64, eos_token_id=0))
    assert model_facts.resolve_vocabulary(None, same, table, None, None) is table


# width, whether a tokenizer of 64 tokens fits it: padding and cutting are common, other models are not
FITS = [(64, True), (128, True), (1152, True), (1153, False), (50_000, False), (33, True), (32, True), (31, False)]


@pytest.mark.parametrize(("width", "fits"), FITS)
def test_fit(width: int, fits: bool) -> None:
    table = vocabulary()
    if fits:
        assert model_facts.resolve_vocabulary(None, None, table, width, None).vocab_size == width
        return
    with pytest.raises(gd.VocabularyError, match=f"64 tokens.*{width} columns.*own tokenizer"):
        model_facts.resolve_vocabulary(None, None, table, width, None)


# ---- options in the way

BANS: list[tuple[str, Any]] = [
    ("min_new_tokens", 3),
    ("min_length", 3),
    ("no_repeat_ngram_size", 2),
    ("encoder_no_repeat_ngram_size", 2),
    ("bad_words_ids", [[3]]),
    ("suppress_tokens", [3]),
    ("begin_suppress_tokens", [3]),
    ("forced_bos_token_id", 1),
    ("forced_eos_token_id", 0),
    ("sequence_bias", {(3,): -1.0}),
    ("repetition_penalty", 1.2),
]


@pytest.mark.parametrize(("name", "value"), BANS, ids=[row[0] for row in BANS])
def test_an_option_that_is_set_is_named_and_no_other(name: str, value: Any) -> None:
    model = SimpleNamespace(generation_config=GenerationConfig(**{name: value}))
    text = model_facts.ban_options_text(model)
    assert f"{name}={value!r}" in text
    assert not [other for other, _ in BANS if other != name and f" {other}=" in text]


@pytest.mark.parametrize("model", [None, SimpleNamespace(), SimpleNamespace(generation_config=GenerationConfig())])
def test_nothing_set_names_what_could_have_been_passed(model: Any) -> None:
    text = model_facts.ban_options_text(model)
    assert all(name in text for name, _ in BANS)


def test_forced_starts(kit: Kit) -> None:
    """Only where it is possible is the first step looked at, which costs a pass over the scores."""
    assert kit.bart.generation_config.forced_bos_token_id == FORCED_BOS
    assert model_facts.forced_start_possible(kit.bart)
    assert model_facts.forced_start_possible(kit.t5)
    assert not model_facts.forced_start_possible(tiny_llama(64, layers=1))
    assert model_facts.forced_start_possible(None)
