"""What a processor needs to know of a model and a tokenizer: width, stop tokens, options that get in the way."""

import weakref
from collections.abc import Sequence
from typing import Any, Final

from gd_plugin.errors import VocabularyError
from gd_plugin.grammars.vocabulary import Vocabulary, checked_ids, checked_size

__all__ = [
    "ban_options_text",
    "forced_start_possible",
    "generation_stop_ids",
    "model_width",
    "resolve_vocabulary",
]

# options of a generation config that ban tokens before a custom processor runs -> the values that ban nothing
_BAN_OPTIONS: Final[dict[str, tuple[Any, ...]]] = {
    "min_new_tokens": (None, 0),
    "min_length": (None, 0),
    "no_repeat_ngram_size": (None, 0),
    "encoder_no_repeat_ngram_size": (None, 0),
    "bad_words_ids": (None, []),
    "suppress_tokens": (None, []),
    "begin_suppress_tokens": (None, []),
    "forced_bos_token_id": (None,),
    "forced_eos_token_id": (None,),
    "sequence_bias": (None, {}, []),
    "repetition_penalty": (None, 1.0),
}
# a model's padding: wider than this over its tokenizer, or narrower than half of it, and they belong to different models
_MOST_PADDING = 2.0
_PADDING_SLACK = 1024

_vocabularies: "weakref.WeakKeyDictionary[Any, dict[Any, Vocabulary]]" = weakref.WeakKeyDictionary()


def model_width(model: Any) -> int | None:
    """Return the columns of the model's logits, or None if it does not tell."""
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    weight = getattr(head, "weight", None)
    if weight is not None and weight.dim() == 2:
        return int(weight.shape[0])
    config: Any = getattr(model, "config", None)
    if hasattr(config, "get_text_config"):
        config = config.get_text_config()
    width = getattr(config, "vocab_size", None)
    return None if width is None else int(width)


def resolve_vocabulary(
    tokenizer: Any,
    model: Any,
    vocabulary: Vocabulary | None,
    vocab_size: int | None,
    stop_token_ids: Sequence[int] | int | None,
) -> Vocabulary:
    """Return the vocabulary that tokenizer, model and caller agree on; stop tokens are the union of what they say.

    Raises:
        TypeError: neither a tokenizer nor a vocabulary, or a vocabulary of the wrong type.
        VocabularyError: tokenizer, model and caller contradict each other.
    """
    width = None if model is None else model_width(model)
    vocab_size = None if vocab_size is None else checked_size(vocab_size)
    if vocab_size is not None and width is not None and vocab_size != width:
        raise VocabularyError(f"vocab_size={vocab_size}, but the model's logits have {width} columns; leave it out")
    width = vocab_size if width is None else width
    stops = {*checked_ids(stop_token_ids, "stop_token_ids"), *_model_stop_ids(model)}
    if vocabulary is not None:
        if not isinstance(vocabulary, Vocabulary):
            raise TypeError(f"vocabulary must be a Vocabulary, got {type(vocabulary).__name__}")
        if tokenizer is not None:
            raise TypeError("pass tokenizer= or vocabulary=, not both")
        return _adapt(vocabulary, width, stops)
    if tokenizer is None:
        raise TypeError("a tokenizer is needed to know what the tokens spell: pass tokenizer=, or vocabulary=")
    tokenizer = getattr(tokenizer, "tokenizer", tokenizer)  # a multimodal processor holds one
    if (eos := getattr(tokenizer, "eos_token_id", None)) is not None:
        stops.add(int(eos))
    # added tokens change a tokenizer, so its size is part of the key
    # a path or a JSON text has a length too, but not the tokenizer's
    sized = hasattr(tokenizer, "__len__") and not isinstance(tokenizer, str | bytes)
    size = len(tokenizer) if sized else None
    key = (size, width, tuple(sorted(stops)))
    try:
        known = _vocabularies.setdefault(tokenizer, {})
    except TypeError:  # cannot be hashed or weakly referenced
        known = {}
    if key not in known:
        if width is not None and size:
            _check_fit(size, width)
        known[key] = Vocabulary.from_tokenizer(
            tokenizer, vocab_size=width, stop_token_ids=sorted(stops) if stops else None
        )
    return known[key]


def generation_stop_ids(model: Any, vocabulary: Vocabulary) -> tuple[int, ...]:
    """Return the ids that `generate` itself recognises as the end, or all stop tokens if that is not known."""
    eos = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    known = tuple(i for i in checked_ids(eos, "the generation config's eos_token_id") if i in vocabulary.stop_token_set)
    return known or vocabulary.stop_token_ids


def forced_start_possible(model: Any) -> bool:
    """Tell whether `generate` may force the first token to be a special one (encoder-decoder models)."""
    if model is None:
        return True
    if getattr(getattr(model, "generation_config", None), "forced_bos_token_id", None) is not None:
        return True
    return bool(getattr(getattr(model, "config", None), "is_encoder_decoder", False))


def ban_options_text(model: Any) -> str:
    """Name the options of the model's generation config that ban tokens, or those that could have been passed."""
    config = getattr(model, "generation_config", None)
    found = {name: getattr(config, name, None) for name in _BAN_OPTIONS}
    active = [f"{name}={value!r}" for name, value in found.items() if value not in _BAN_OPTIONS[name]]
    if active:
        return f"Set in the model's generation config: {', '.join(active)}; look at the arguments of generate too."
    return f"Options that do this: {', '.join(_BAN_OPTIONS)}; look at the arguments of generate."


def _model_stop_ids(model: Any) -> list[int]:
    config: Any = getattr(model, "config", None)
    text_config = config.get_text_config() if hasattr(config, "get_text_config") else config
    stops: list[int] = []
    for source in (getattr(model, "generation_config", None), config, text_config):
        stops.extend(checked_ids(getattr(source, "eos_token_id", None), "the model's eos_token_id"))
    return stops


def _check_fit(size: int, width: int) -> None:
    if width > _MOST_PADDING * size + _PADDING_SLACK or width < size / 2:
        raise VocabularyError(
            f"the tokenizer has {size} tokens but the model's logits have {width} columns: they belong to different "
            "models; pass the model's own tokenizer"
        )


def _adapt(vocabulary: Vocabulary, width: int | None, stops: set[int]) -> Vocabulary:
    """Return the vocabulary with the model's width and stop tokens."""
    stops = stops | vocabulary.stop_token_set
    if (width is None or width == vocabulary.vocab_size) and stops == vocabulary.stop_token_set:
        return vocabulary
    if width is not None:
        _check_fit(vocabulary.vocab_size, width)
    return Vocabulary(
        vocabulary.tokens,
        stop_token_ids=stops,
        special_token_names=vocabulary.special_token_names,
        vocab_size=width,
    )
