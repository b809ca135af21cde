"""What the plugin must know of an engine: its vocabulary, and one compiler for each backend a request may name.

In:  a `VllmConfig`, by the attributes it has had since vLLM 0.11.      Out: compiled guides, as futures.
"""

import sys
from concurrent.futures import Future
from typing import Any

from gd_plugin.config import GuidedDecodingConfig
from gd_plugin.grammars.backends.registry import CompiledGrammar
from gd_plugin.grammars.compiler import GrammarMatcherFactory, shared_factory
from gd_plugin.grammars.vocabulary import Vocabulary, checked_ids
from gd_plugin.vllm.params import GuideParams

__all__ = ["GuideCompiler", "engine_config", "read_vocabulary", "request_stop_ids"]

# frames between the engine's request check and `validate_params`: three in vLLM 0.32
_MOST_FRAMES = 12


class GuideCompiler:
    """Compilers for one vocabulary, one for each backend, made when a request first names it."""

    def __init__(self, vocabulary: Vocabulary, config: GuidedDecodingConfig) -> None:
        self.vocabulary = vocabulary
        self.config = config
        self._factories: dict[str, GrammarMatcherFactory] = {}

    def submit(self, params: GuideParams) -> "Future[CompiledGrammar]":
        """Start compiling; the future is done already where the guide is known.

        Raises:
            ValueError: no backend of that name.
            BackendNotInstalledError: its engine is missing.
        """
        return self._factory(params.backend).submit(params.guide)

    def compile(self, params: GuideParams) -> CompiledGrammar:
        """Compile and wait.

        Raises:
            GuideError: the guide is wrong, or no allowed backend can enforce it.
            ValueError: no backend of that name.
            BackendNotInstalledError: its engine is missing.
        """
        return self._factory(params.backend).compile(params.guide)

    def _factory(self, backend: str) -> GrammarMatcherFactory:
        factory = self._factories.get(backend)
        if factory is None:
            config = self.config if backend == "auto" else self.config.replace_fields(backend=backend)
            factory = self._factories[backend] = shared_factory(self.vocabulary, config)
        return factory


def read_vocabulary(vllm_config: Any) -> Vocabulary:
    """Return the vocabulary of an engine's model.

    The stop tokens are all that the model or its tokenizer name, so that none of them is ever taken for text.

    Raises:
        VocabularyError: the tokenizer cannot be read, or does not fit the model.
    """
    from transformers import AutoTokenizer

    model_config = vllm_config.model_config
    tokenizer = AutoTokenizer.from_pretrained(
        model_config.tokenizer,
        revision=getattr(model_config, "tokenizer_revision", None),
        trust_remote_code=bool(getattr(model_config, "trust_remote_code", False)),
    )
    stops: set[int] = set()
    generation = model_config.try_get_generation_config() or {}
    for ids in (
        getattr(tokenizer, "eos_token_id", None),
        generation.get("eos_token_id"),
        getattr(model_config.hf_text_config, "eos_token_id", None),
    ):
        stops.update(checked_ids(ids, "the model's eos_token_id"))
    width = int(model_config.get_vocab_size())
    known = sorted(i for i in stops if 0 <= i < width)
    return Vocabulary.from_tokenizer(tokenizer, vocab_size=width, stop_token_ids=known or None)


def request_stop_ids(sampling_params: Any) -> frozenset[int]:
    """Return the ids at which the engine ends a request; empty if it does not tell, or is told to ignore them."""
    # all_stop_token_ids is complete even under ignore_eos; the engine then stops at none of the model's
    if getattr(sampling_params, "ignore_eos", False):
        return frozenset(checked_ids(getattr(sampling_params, "stop_token_ids", None), "stop_token_ids"))
    stops = set(checked_ids(getattr(sampling_params, "all_stop_token_ids", None), "all_stop_token_ids"))
    stops.update(checked_ids(getattr(sampling_params, "eos_token_id", None), "eos_token_id"))
    stops.update(checked_ids(getattr(sampling_params, "stop_token_ids", None), "stop_token_ids"))
    return frozenset(stops)


def engine_config() -> Any:
    """Return the `VllmConfig` of the engine that is checking a request, or None.

    `validate_params` gets the request alone. Whether the engine will call the processor at all is in the configuration
    of whoever called it.
    """
    frame = sys._getframe(1)
    for _ in range(_MOST_FRAMES):
        config = getattr(frame.f_locals.get("self"), "vllm_config", None)
        if config is not None:
            return config
        if frame.f_back is None:
            return None
        frame = frame.f_back
    return None
