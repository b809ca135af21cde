"""Backends by name: what an adapter must offer, and how a third party adds one."""

import json
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from typing import ClassVar

from gd_plugin.config import GuidedDecodingConfig
from gd_plugin.errors import BackendNotInstalledError
from gd_plugin.grammars.matcher import GrammarMatcher
from gd_plugin.grammars.vocabulary import Vocabulary
from gd_plugin.guides.guide import Guide, GuideType
from gd_plugin.guides.problem import Problem
from gd_plugin.guides.structural_tag import embedded_schemas

__all__ = [
    "ALLOW_A_TEXT",
    "USE_ANOTHER",
    "Backend",
    "BackendFactory",
    "CompiledGrammar",
    "backend_names",
    "create_backend",
    "embedded_problems",
    "register_backend",
]


# what to do about an adapter's refusals
ALLOW_A_TEXT = "allow at least one text that this vocabulary can spell"
USE_ANOTHER = "write the guide without it, or use another backend"


class CompiledGrammar(ABC):
    """A guide compiled for one vocabulary. Shared between threads; its matchers are not.

    Attributes:
        guide: the guide.
        backend: name of the backend that enforces it.
        reason: why this backend was chosen.
        not_enforced: constructs that were dropped because the caller passed `strict=False`.
        nbytes: memory it holds, as far as its engine tells.
    """

    guide: Guide
    backend: str
    reason: str = ""
    not_enforced: tuple[Problem, ...] = ()
    nbytes: int = 0

    @abstractmethod
    def create_matcher(self) -> GrammarMatcher:
        """Return a new matcher at the start of the guide."""


class Backend(ABC):
    """A grammar engine for one vocabulary and one configuration. Safe to use from several threads."""

    name: ClassVar[str]

    @abstractmethod
    def problems(self, guide: Guide) -> list[Problem]:
        """Return what this backend cannot enforce exactly in `guide`; empty means that it can take all of it."""

    @abstractmethod
    def compile(self, guide: Guide) -> CompiledGrammar:
        """Compile a guide.

        Raises:
            GuideError: the guide is wrong; the message has the place in front.
        """

    def estimate_compile_s(self, guide: Guide) -> float | None:
        """Return an estimate of the seconds that compiling takes, without compiling; None where it cannot be told."""
        return None

    def is_large(self, guide: Guide) -> bool:
        """Tell whether a guide should compile in another process first, which can be ended.

        Only where another process can create this backend by its name.
        """
        return False

    def dump(self, compiled: CompiledGrammar) -> bytes:
        """Return what `load` makes a compiled grammar of this backend from, in another process.

        Here nothing: that the guide compiled shows that it can, in time and memory, and `load` compiles it again.
        """
        return b""

    def load(self, guide: Guide, data: bytes) -> CompiledGrammar:
        """Return the compiled grammar that `dump` wrote, for the same vocabulary and configuration."""
        return self.compile(guide)


def embedded_problems(backend: Backend, guide: Guide) -> list[Problem]:
    """Return what `backend` cannot enforce in the JSON Schemas inside a structural tag, with pointers into the tag."""
    found = []
    for pointer, schema in embedded_schemas(json.loads(guide.guide)["format"]):
        for problem in backend.problems(Guide(GuideType.JSON_SCHEMA, json.dumps(schema, ensure_ascii=False))):
            found.append(replace(problem, pointer=pointer + problem.pointer.removeprefix("#")))
    return found


BackendFactory = Callable[[Vocabulary, GuidedDecodingConfig], Backend]


def _builtin(module: str, name: str, install: str) -> BackendFactory:
    def create(vocabulary: Vocabulary, config: GuidedDecodingConfig) -> Backend:
        try:
            adapter = import_module(module)
        except ImportError as error:
            if isinstance(error, BackendNotInstalledError):
                raise
            raise BackendNotInstalledError(
                f"backend {name!r} is not installed ({error}): pip install '{install}'", name=error.name
            ) from error
        backend: Backend = adapter.create_backend(vocabulary, config)
        return backend

    return create


_lock = threading.Lock()
_factories: dict[str, BackendFactory] = {
    "xgrammar": _builtin("gd_plugin.grammars.backends.xgrammar", "xgrammar", "xgrammar>=0.2.8"),
    "llguidance": _builtin("gd_plugin.grammars.backends.llguidance", "llguidance", "llguidance>=1.7"),
    "outlines_core": _builtin("gd_plugin.grammars.backends.outlines_core", "outlines_core", "outlines-core>=0.2.14"),
}


def register_backend(name: str, factory: BackendFactory) -> None:
    """Add a backend, or replace one of the same name.

    Args:
        name: what `backend=` will say; "auto" is taken.
        factory: called as `factory(vocabulary, config)`, returns a `Backend`.

    Raises:
        ValueError: no name, or "auto".
        TypeError: `factory` cannot be called.
    """
    if not isinstance(name, str) or not name or name == "auto":
        raise ValueError(f"a backend needs a name other than 'auto', got {name!r}")
    if not callable(factory):
        raise TypeError(f"the factory of backend {name!r} must be callable, got {type(factory).__name__}")
    with _lock:
        _factories[name] = factory


def backend_names() -> tuple[str, ...]:
    """Names of all registered backends, in the order they are tried by "auto"."""
    with _lock:
        return tuple(_factories)


def create_backend(name: str, vocabulary: Vocabulary, config: GuidedDecodingConfig) -> Backend:
    """Return the backend called `name` for this vocabulary and configuration.

    Raises:
        ValueError: no such backend; the message lists those there are.
        BackendNotInstalledError: its engine is missing; the message names the pip command.
    """
    with _lock:
        factory = _factories.get(name)
    if factory is None:
        raise ValueError(f"unknown backend {name!r}; there are {', '.join(('auto', *backend_names()))}")
    return factory(vocabulary, config)
