"""Guided decoding: a language model's output obeys a guide, token by token.

Everything public is here; names are resolved on first use, so `import gd_plugin` loads neither torch's CUDA side,
transformers, vllm, triton nor any grammar engine.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from gd_plugin.version import __version__

if TYPE_CHECKING:
    from gd_plugin.config import GuidedDecodingConfig
    from gd_plugin.decoding.capturable import CapturableGuidedDecoder
    from gd_plugin.decoding.decoder import GuidedDecoder
    from gd_plugin.decoding.requests import DraftTree, GuidedRequest, GuidedRequests
    from gd_plugin.errors import (
        BackendNotInstalledError,
        CompileTimeoutError,
        DeadEndError,
        GuidedDecodingError,
        GuideError,
        GuideTooLargeError,
        InvalidGuideError,
        MatcherError,
        RollbackError,
        TokenRejectedError,
        UnsatisfiableGuideError,
        UnsupportedGuideError,
        VocabularyError,
    )
    from gd_plugin.grammars.backends.registry import Backend, CompiledGrammar, register_backend
    from gd_plugin.grammars.compiler import CacheInfo, GrammarMatcherFactory
    from gd_plugin.grammars.forced import Drafter, PassCost
    from gd_plugin.grammars.linting import LintReport, lint
    from gd_plugin.grammars.matcher import EngineMatcher, GrammarMatcher
    from gd_plugin.grammars.validation import Verdict, validate
    from gd_plugin.grammars.vocabulary import Vocabulary
    from gd_plugin.guides.guide import Guide, GuideType, Reasoning
    from gd_plugin.guides.problem import Problem
    from gd_plugin.hf.drafting import grammar_drafting
    from gd_plugin.hf.processor import GuidedLogitsProcessor
    from gd_plugin.hf.results import RowResult
    from gd_plugin.masks.apply import apply_token_bitmask_
    from gd_plugin.masks.argmax import argmax_under_bitmask
    from gd_plugin.masks.bitmask import allocate_token_bitmask, row_has_valid_token
    from gd_plugin.masks.shard import VocabShard
    from gd_plugin.reports.report import Report

# public name -> the module that defines it; held equal to the imports above by a test
_HOMES = {
    "Backend": "gd_plugin.grammars.backends.registry",
    "BackendNotInstalledError": "gd_plugin.errors",
    "CacheInfo": "gd_plugin.grammars.compiler",
    "CapturableGuidedDecoder": "gd_plugin.decoding.capturable",
    "CompileTimeoutError": "gd_plugin.errors",
    "CompiledGrammar": "gd_plugin.grammars.backends.registry",
    "DeadEndError": "gd_plugin.errors",
    "DraftTree": "gd_plugin.decoding.requests",
    "Drafter": "gd_plugin.grammars.forced",
    "EngineMatcher": "gd_plugin.grammars.matcher",
    "GrammarMatcher": "gd_plugin.grammars.matcher",
    "GrammarMatcherFactory": "gd_plugin.grammars.compiler",
    "Guide": "gd_plugin.guides.guide",
    "GuideError": "gd_plugin.errors",
    "GuideTooLargeError": "gd_plugin.errors",
    "GuideType": "gd_plugin.guides.guide",
    "GuidedDecoder": "gd_plugin.decoding.decoder",
    "GuidedDecodingConfig": "gd_plugin.config",
    "GuidedDecodingError": "gd_plugin.errors",
    "GuidedLogitsProcessor": "gd_plugin.hf.processor",
    "GuidedRequest": "gd_plugin.decoding.requests",
    "GuidedRequests": "gd_plugin.decoding.requests",
    "InvalidGuideError": "gd_plugin.errors",
    "LintReport": "gd_plugin.grammars.linting",
    "MatcherError": "gd_plugin.errors",
    "PassCost": "gd_plugin.grammars.forced",
    "Problem": "gd_plugin.guides.problem",
    "Reasoning": "gd_plugin.guides.guide",
    "Report": "gd_plugin.reports.report",
    "RollbackError": "gd_plugin.errors",
    "RowResult": "gd_plugin.hf.results",
    "TokenRejectedError": "gd_plugin.errors",
    "UnsatisfiableGuideError": "gd_plugin.errors",
    "UnsupportedGuideError": "gd_plugin.errors",
    "Verdict": "gd_plugin.grammars.validation",
    "VocabShard": "gd_plugin.masks.shard",
    "Vocabulary": "gd_plugin.grammars.vocabulary",
    "VocabularyError": "gd_plugin.errors",
    "allocate_token_bitmask": "gd_plugin.masks.bitmask",
    "apply_token_bitmask_": "gd_plugin.masks.apply",
    "argmax_under_bitmask": "gd_plugin.masks.argmax",
    "grammar_drafting": "gd_plugin.hf.drafting",
    "lint": "gd_plugin.grammars.linting",
    "register_backend": "gd_plugin.grammars.backends.registry",
    "row_has_valid_token": "gd_plugin.masks.bitmask",
    "validate": "gd_plugin.grammars.validation",
}

__all__ = [
    "Backend",
    "BackendNotInstalledError",
    "CacheInfo",
    "CapturableGuidedDecoder",
    "CompileTimeoutError",
    "CompiledGrammar",
    "DeadEndError",
    "DraftTree",
    "Drafter",
    "EngineMatcher",
    "GrammarMatcher",
    "GrammarMatcherFactory",
    "Guide",
    "GuideError",
    "GuideTooLargeError",
    "GuideType",
    "GuidedDecoder",
    "GuidedDecodingConfig",
    "GuidedDecodingError",
    "GuidedLogitsProcessor",
    "GuidedRequest",
    "GuidedRequests",
    "InvalidGuideError",
    "LintReport",
    "MatcherError",
    "PassCost",
    "Problem",
    "Reasoning",
    "Report",
    "RollbackError",
    "RowResult",
    "TokenRejectedError",
    "UnsatisfiableGuideError",
    "UnsupportedGuideError",
    "Verdict",
    "VocabShard",
    "Vocabulary",
    "VocabularyError",
    "__version__",
    "allocate_token_bitmask",
    "apply_token_bitmask_",
    "argmax_under_bitmask",
    "grammar_drafting",
    "lint",
    "register_backend",
    "row_has_valid_token",
    "validate",
]


def __getattr__(name: str) -> Any:
    if name == "hf":  # a room with public names of its own
        return import_module("gd_plugin.hf")
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'gd_plugin' has no attribute {name!r}")
    value = getattr(import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
