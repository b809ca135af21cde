"""The bare engines, driven as their own users drive them, for `gd-plugin bench` to compare with.

In:  an engine's name, a guide, a vocabulary.      Out: what compiling costs, and a state that fills masks and accepts.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch

from gd_plugin.grammars.vocabulary import Vocabulary
from gd_plugin.guides.guide import Guide, GuideType

__all__ = ["RawEngine", "raw_engine"]


@dataclass(frozen=True)
class RawEngine:
    """One engine for one vocabulary and guide.

    Attributes:
        compile: compiles the guide, with no cache; returns what `start` takes.
        start: returns (fill row 0 of a bitmask, accept a token and tell whether it was legal).
        apply: bans columns in place, or None where the engine has no such function.
    """

    compile: Callable[[], Any]
    start: Callable[[Any], tuple[Callable[[torch.Tensor], None], Callable[[int], bool]]]
    apply: Callable[[torch.Tensor, torch.Tensor], None] | None


def raw_engine(name: str, guide: Guide, vocabulary: Vocabulary) -> RawEngine | None:
    """Return the engine, or None where it is not installed or does not take this kind of guide by itself."""
    make = {"xgrammar": _xgrammar, "llguidance": _llguidance}.get(name)
    if make is None or guide.reasoning is not None:
        return None
    try:
        return make(guide, vocabulary)
    except ImportError:
        return None


def _xgrammar(guide: Guide, vocabulary: Vocabulary) -> RawEngine | None:
    xgrammar: Any = import_module("xgrammar")
    tokens = [b"" if i in vocabulary.not_text else token for i, token in enumerate(vocabulary.tokens)]
    info = xgrammar.TokenizerInfo(
        tokens,
        xgrammar.VocabType.RAW,
        vocab_size=vocabulary.vocab_size,
        stop_token_ids=list(vocabulary.stop_token_ids),
    )
    compiler = xgrammar.GrammarCompiler(info, cache_enabled=False)
    compilers: dict[GuideType, Callable[[], Any]] = {
        GuideType.JSON: compiler.compile_builtin_json_grammar,
        GuideType.JSON_SCHEMA: lambda: compiler.compile_json_schema(guide.guide, any_whitespace=True),
        GuideType.REGEX: lambda: compiler.compile_regex(guide.guide),
        GuideType.EBNF_GRAMMAR: lambda: compiler.compile_grammar(guide.guide, root_rule_name=guide.start),
        GuideType.CHOICE: lambda: compiler.compile_grammar(_choice_rule(guide)),
    }
    compile_guide = compilers.get(guide.guide_type)
    if compile_guide is None:
        return None

    def start(compiled: Any) -> tuple[Callable[[torch.Tensor], None], Callable[[int], bool]]:
        matcher = xgrammar.GrammarMatcher(compiled)
        return lambda bitmask: matcher.fill_next_token_bitmask(bitmask, 0), matcher.accept_token

    return RawEngine(compile_guide, start, xgrammar.apply_token_bitmask_inplace)


def _choice_rule(guide: Guide) -> str:
    return "root ::= " + " | ".join(json.dumps(option) for option in guide.options())


def _llguidance(guide: Guide, vocabulary: Vocabulary) -> RawEngine | None:
    llguidance: Any = import_module("llguidance")
    torch_masks: Any = import_module("llguidance.torch")
    # reading a vocabulary is once a model, and the adapter has the reader
    tokenizer = import_module("gd_plugin.grammars.backends.llguidance")._engine_tokenizer(vocabulary)
    matcher_class = llguidance.LLMatcher
    grammars: dict[GuideType, Callable[[], str]] = {
        GuideType.JSON: lambda: matcher_class.grammar_from_json_schema("{}"),
        GuideType.JSON_SCHEMA: lambda: matcher_class.grammar_from_json_schema(guide.guide),
        GuideType.REGEX: lambda: matcher_class.grammar_from_regex(guide.guide),
        GuideType.LARK_GRAMMAR: lambda: matcher_class.grammar_from_lark(guide.guide),
        GuideType.CHOICE: lambda: llguidance.grammar_from("choice", guide.guide),
    }
    grammar_of = grammars.get(guide.guide_type)
    if grammar_of is None:
        return None

    def compile_guide() -> Any:
        matcher = matcher_class(tokenizer, grammar_of(), log_level=0)
        if matcher.is_error():
            raise ValueError(matcher.get_error())
        return matcher

    def start(compiled: Any) -> tuple[Callable[[torch.Tensor], None], Callable[[int], bool]]:
        matcher = compiled.deep_copy()

        def accept(token_id: int) -> bool:
            return bool(matcher.try_consume_tokens([token_id]) == 1)

        return lambda bitmask: torch_masks.fill_next_token_bitmask(matcher, bitmask, 0), accept

    return RawEngine(compile_guide, start, torch_masks.apply_token_bitmask_inplace)
