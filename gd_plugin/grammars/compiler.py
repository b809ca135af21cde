"""Guide -> backend -> CompiledGrammar, cached.

In:  guides, one Vocabulary, one GuidedDecodingConfig.
Out: compiled grammars and matchers.
Kept here: the choice of a backend is reported, an explicit choice never falls back, one guide is compiled once however
many threads ask for it, and the cache is bounded by bytes.
"""

import json
import logging
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from dataclasses import replace
from functools import partial
from typing import NamedTuple

from gd_plugin.config import GuidedDecodingConfig, checked_config
from gd_plugin.errors import (
    BackendNotInstalledError,
    GuideError,
    GuideTooLargeError,
    UnsatisfiableGuideError,
    UnsupportedGuideError,
)
from gd_plugin.grammars.backends.registry import Backend, CompiledGrammar, backend_names, create_backend
from gd_plugin.grammars.background import BackgroundThreads
from gd_plugin.grammars.canonical import CanonicalGrammar
from gd_plugin.grammars.matcher import GrammarMatcher
from gd_plugin.grammars.reasoning import ReasoningGrammar
from gd_plugin.grammars.spellable import is_spellable
from gd_plugin.grammars.vocabulary import Vocabulary
from gd_plugin.grammars.worker import CompileWorker, fill_first_row
from gd_plugin.guides.guide import Guide, GuideType, check_guide
from gd_plugin.guides.language import is_regular
from gd_plugin.guides.limits import check_limits, num_written_positions
from gd_plugin.guides.problem import Problem
from gd_plugin.guides.schema import normal_form
from gd_plugin.guides.structural_tag import embedded_schemas, tag_begin

__all__ = ["CacheInfo", "GrammarMatcherFactory", "cheapest_first", "check_sound", "shared_factory"]

_log = logging.getLogger(__name__)

# A compiled grammar whose engine does not tell its size is counted as this much.
_UNKNOWN_BYTES = 1 << 16
# A guide with a longer text is not even looked through for what a backend cannot enforce but in a process that can be
# ended.
_MAX_TEXT_HERE = 50_000
# The normal form of a schema is made in counted steps: half a second for the largest of these.
_MAX_SCHEMA_HERE = 200_000
# Characters with repeats written out from which llguidance is tried before xgrammar (benchmarks/guide_costs.py): for 40 of
# them a first request costs 0.12 s there and 0.86 s with xgrammar. Those of a choice are fixed, and cost both the same up to
# hundreds.
_LAZY_POSITIONS = 30
_LAZY_CHOICE_POSITIONS = 1_000
# Factories that `shared_factory` keeps: one a model and configuration in use.
_SHARED_FACTORIES = 4


class CacheInfo(NamedTuple):
    """State of a factory's cache: entries and bytes held, the limit in bytes, hits and misses so far."""

    entries: int
    bytes: int
    limit_bytes: int
    hits: int
    misses: int


class GrammarMatcherFactory:
    """Compile guides for one vocabulary and create matchers for them. Safe to use from several threads.

    Args:
        vocabulary: the model's vocabulary.
        backend: "auto", or one backend, which is then never replaced by another. Wins over `config.backend`.
        config: settings; None is the defaults.

    Raises:
        ValueError: no backend of that name; the message lists those there are.
        BackendNotInstalledError: the named backend's engine is missing.
        TypeError: `vocabulary` is none.
    """

    def __init__(
        self, vocabulary: Vocabulary, *, backend: str = "auto", config: GuidedDecodingConfig | None = None
    ) -> None:
        if not isinstance(vocabulary, Vocabulary):
            raise TypeError(
                f"vocabulary must be a Vocabulary, got {type(vocabulary).__name__}; use Vocabulary.from_tokenizer(...)"
            )
        config = checked_config(config)
        self.vocabulary = vocabulary
        self.config = config if backend == "auto" else config.replace_fields(backend=backend)
        self._backends: dict[str, Backend] = {}
        self._worker = CompileWorker(vocabulary, self.config)
        self._lock = threading.Lock()
        self._cache: OrderedDict[Guide, Future[CompiledGrammar]] = OrderedDict()
        self._sizes: dict[Guide, int] = {}
        # submitted, and neither begun nor dropped
        self._queued: set[Future[CompiledGrammar]] = set()
        self._hits = 0
        self._misses = 0
        num_threads = max(1, (os.cpu_count() or 2) // 2)
        self._background = BackgroundThreads(num_threads, "gd_plugin-compile", at_exit=self._worker.stop)
        if self.config.backend != "auto":
            self._backend(self.config.backend)

    def create(self, guide: Guide) -> GrammarMatcher:
        """Return a new matcher at the start of `guide`, compiling it if need be.

        Raises:
            GuideError: the guide is wrong, or no allowed backend can enforce it.
        """
        return self.compile(guide).create_matcher()

    def compile(self, guide: Guide) -> CompiledGrammar:
        """Return the compiled guide, from the cache where it has it. Blocks while another thread compiles the same.

        Raises:
            GuideError: the guide is wrong, or no allowed backend can enforce it.
            CompileTimeoutError: it took longer than `compile_timeout_s` seconds.
            TypeError: `guide` is none.
        """
        if not isinstance(guide, Guide):
            raise TypeError(f"guide must be a Guide, got {type(guide).__name__}; use Guide.json_schema(...) and so on")
        while True:
            own: Future[CompiledGrammar] = Future()
            mine = [own]
            try:
                future = self._claim(guide, own)
                # one that is queued need not be waited for; it may be queued behind the very thread that asks
                if future is own or self._take(future, mine):
                    self._fulfil(guide, future)
                return future.result()
            except CancelledError:
                # whoever was to compile it was interrupted or dropped; that is their affair alone
                continue
            except BaseException:
                # an interrupt comes anywhere: nobody may be left to wait for what nobody compiles
                for future in mine:
                    self._drop(guide, future)
                raise

    def submit(self, guide: Guide) -> "Future[CompiledGrammar]":
        """Start compiling in the background and return a future; a cached guide's future is done already.

        What is still queued when the interpreter goes, or at `close`, is dropped: its future is cancelled.

        Raises:
            TypeError: `guide` is none. What else `compile` raises is in the future.
        """
        if not isinstance(guide, Guide):
            raise TypeError(f"guide must be a Guide, got {type(guide).__name__}; use Guide.json_schema(...) and so on")
        own: Future[CompiledGrammar] = Future()
        try:
            # queued before anybody can find it: an interrupt between the two would leave them waiting
            with self._lock:
                self._queued.add(own)
            future = self._claim(guide, own)
            if future is own:
                self._background.submit(
                    partial(self._unless_taken, self._fulfil, guide, own),
                    partial(self._unless_taken, self._drop, guide, own),
                )
            else:
                self._take(own)
        except BaseException:
            self._unless_taken(self._drop, guide, own)
            raise
        return future

    def close(self) -> None:
        """Drop what is queued, end the process that compiles large guides. What is used afterwards starts them anew.

        A compilation under way in that process fails; compiled guides stay valid.
        """
        self._background.drop()
        self._worker.stop()

    def cache_info(self) -> CacheInfo:
        """Return what the cache holds."""
        with self._lock:
            return CacheInfo(
                len(self._sizes), sum(self._sizes.values()), self.config.cache_bytes, self._hits, self._misses
            )

    def clear_cache(self) -> None:
        """Forget every compiled guide; those in use stay valid."""
        with self._lock:
            for guide in self._sizes:
                del self._cache[guide]
            self._sizes.clear()

    def _claim(self, guide: Guide, own: "Future[CompiledGrammar]") -> "Future[CompiledGrammar]":
        """Return the guide's future: `own` if the caller is the one to fulfil it."""
        with self._lock:
            future = self._cache.get(guide)
            if future is not None and not future.cancelled():
                self._hits += 1
                self._cache.move_to_end(guide)
                return future
            self._misses += 1
            self._cache[guide] = own
            return own

    def _take(self, future: "Future[CompiledGrammar]", mine: "list[Future[CompiledGrammar]] | None" = None) -> bool:
        """Whether the caller is the one to do what is queued for a future; it is so once, and then `mine` has it too."""
        with self._lock:
            if future not in self._queued:
                return False
            if mine is not None:
                # first: whoever is interrupted here drops it, and nothing is done for it twice
                mine.append(future)
            self._queued.discard(future)
            return True

    def _unless_taken(
        self, act: Callable[[Guide, "Future[CompiledGrammar]"], None], guide: Guide, future: "Future[CompiledGrammar]"
    ) -> None:
        if self._take(future):
            act(guide, future)

    def _fulfil(self, guide: Guide, future: "Future[CompiledGrammar]") -> None:
        if not future.set_running_or_notify_cancel():
            # cancelled by whoever submitted it
            self._forget(guide, future)
            return
        start = time.perf_counter()
        try:
            compiled = self._compile(guide)
        except Exception as error:
            # not kept: the next try may find a backend that was installed meanwhile
            self._forget(guide, future)
            future.set_exception(error)
        except BaseException:
            self._drop(guide, future)
            raise
        else:
            self._keep(guide, future, compiled)
            future.set_result(compiled)
            _log.info(
                "%s guide compiled by %s in %.1f ms, %d bytes: %s",
                guide.guide_type.value,
                compiled.backend,
                1e3 * (time.perf_counter() - start),
                compiled.nbytes,
                compiled.reason,
            )

    def _drop(self, guide: Guide, future: "Future[CompiledGrammar]") -> None:
        """Have those who wait for the future look again; nothing if it is done."""
        if not future.done():
            self._forget(guide, future)
            if not future.cancel():
                future.set_exception(CancelledError())

    def _forget(self, guide: Guide, future: "Future[CompiledGrammar]") -> None:
        with self._lock:
            if self._cache.get(guide) is future:
                del self._cache[guide]
                self._sizes.pop(guide, None)

    def _keep(self, guide: Guide, future: "Future[CompiledGrammar]", compiled: CompiledGrammar) -> None:
        with self._lock:
            if self._cache.get(guide) is not future:
                return
            self._sizes[guide] = compiled.nbytes or _UNKNOWN_BYTES
            total = sum(self._sizes.values())
            for oldest in list(self._cache):
                if total <= self.config.cache_bytes:
                    break
                if oldest in self._sizes:
                    size = self._sizes.pop(oldest)
                    total -= size
                    del self._cache[oldest]
                    _log.debug(
                        "a %s guide of %d bytes leaves the cache: cache_bytes=%d",
                        oldest.guide_type.value,
                        size,
                        self.config.cache_bytes,
                    )

    def _backend(self, name: str) -> Backend:
        with self._lock:
            backend = self._backends.get(name)
        if backend is None:
            backend = create_backend(name, self.vocabulary, self.config)
            with self._lock:
                backend = self._backends.setdefault(name, backend)
        return backend

    def _compile(self, guide: Guide) -> CompiledGrammar:
        """Compile with the configured backend, or with the cheapest one that enforces all of the guide.

        Without `strict`, where none enforces all of it: with the one that drops least.
        """
        check_sound(guide, self.config)
        if guide.reasoning is not None:
            # the guide behind the free text is a cache entry of its own
            return ReasoningGrammar(guide, self.compile(replace(guide, reasoning=None)), self.vocabulary)
        if self.config.backend != "auto":
            return self._compile_with(self.config.backend, guide, "chosen by the caller")
        refused: dict[str, GuideError] = {}
        missing: dict[str, str] = {}
        names = cheapest_first(guide)
        for name in names:
            try:
                reason = "cheapest backend that enforces all of the guide"
                if refused:
                    reason += f" ({', '.join(refused)} cannot)"
                return self._compile_with(name, guide, reason, exactly=True)
            except (UnsupportedGuideError, GuideTooLargeError) as error:
                _log.debug("%s does not take this %s guide: %s", name, guide.guide_type.value, error)
                refused[name] = error
            except BackendNotInstalledError as error:
                _log.debug("%s is passed over: %s", name, error)
                missing[name] = str(error)
        if not self.config.strict:
            for name in sorted(refused, key=lambda name: self._num_dropped(name, guide)):
                try:
                    return self._compile_with(name, guide, "no backend enforces all of the guide; this one drops least")
                except (UnsupportedGuideError, GuideTooLargeError) as error:
                    refused[name] = error
        # the place is named by the backend that came closest
        closest = sorted(refused, key=lambda name: self._num_dropped(name, guide))
        raise _no_backend(guide, {name: refused[name] for name in closest}, missing)

    def _is_refused(self, guide: Guide) -> bool:
        """Whether it is known, before anything is compiled, that compiling raises."""
        if guide.guide_type is not GuideType.JSON_SCHEMA or not _is_read_here(guide):
            return False
        try:
            normal_form(guide.guide, self.config)
        except GuideError:
            return True
        return False

    def _num_dropped(self, name: str, guide: Guide) -> int:
        # looking at a longer text is work for the worker, and one backend is as good as another then
        return len(self._backend(name).problems(guide)) if _is_read_here(guide) else 0

    def _compile_with(self, name: str, guide: Guide, reason: str, exactly: bool = False) -> CompiledGrammar:
        exactly = exactly or self.config.strict
        backend = self._backend(name)
        large = backend.is_large(guide) and not self._is_refused(guide)
        problems: list[Problem] = []
        data: bytes | None = None
        if not large or _is_read_here(guide):
            problems = backend.problems(guide)
        if large and not (problems and exactly):
            problems, data = self._worker.compile(name, guide)
        if problems and exactly:
            raise _refusal(name, guide, problems)
        if data is None:
            compiled = backend.compile(guide)
        else:
            compiled = backend.load(guide, data)
            # the worker has shown that this mask ends; the first request need not wait for it
            fill_first_row(compiled, self.vocabulary)
        if is_spellable(compiled, self.vocabulary) is False:
            raise UnsatisfiableGuideError(
                f"#: no tokens of this vocabulary spell a text that the {guide.guide_type.value} guide allows",
                pointer="#",
                keyword="tokenizer",
                hint="use the vocabulary of the model that generates, or allow a text that its tokens spell",
            )
        compiled.reason = reason
        compiled.not_enforced = tuple(problems)
        if problems:
            first = problems[0]
            _log.warning(
                "%s does not enforce %d constructs, first %s: %s", name, len(problems), first.pointer, first.message
            )
        return CanonicalGrammar(compiled, self.vocabulary) if self.config.canonical_forcing else compiled


def check_sound(guide: Guide, config: GuidedDecodingConfig) -> None:
    """Raise what is wrong with a guide, whatever the backend: limits, its text, schemas inside a structural tag.

    Raises:
        GuideError: it is.
    """
    if len(guide.guide) <= config.max_guide_bytes:
        check_guide(guide)
    check_limits(guide, config)
    if guide.guide_type is GuideType.STRUCTURAL_TAG and _is_read_here(guide):
        _check_embedded_schemas(guide, config)


def _check_embedded_schemas(guide: Guide, config: GuidedDecodingConfig) -> None:
    """Raise what is wrong with a schema inside a structural tag, with its place in the tag in front."""
    form = json.loads(guide.guide)["format"]
    for pointer, schema in embedded_schemas(form):
        try:
            normal_form(json.dumps(schema, ensure_ascii=False), config)
        except UnsupportedGuideError:
            # each backend says what it cannot enforce
            continue
        except GuideError as error:
            place = pointer + (error.pointer or "#").removeprefix("#")
            message = error.message.removeprefix(f"{error.pointer}: ")
            begin = tag_begin(form, pointer)
            named = f"in the tag {begin!r}: " if begin else ""
            raise error.placed(f"{place}: {named}{message}", place) from error


def _is_read_here(guide: Guide) -> bool:
    limit = _MAX_SCHEMA_HERE if guide.guide_type is GuideType.JSON_SCHEMA else _MAX_TEXT_HERE
    return len(guide.guide) <= limit


def cheapest_first(guide: Guide) -> list[str]:
    """Return the backends in the order to try; docs/backends.md has the measurements behind it."""
    names = list(backend_names())
    if guide.guide_type in (GuideType.JSON, GuideType.JSON_SCHEMA):
        # xgrammar compiles them in 0.1 s to minutes, llguidance in milliseconds, and its masks inside texts cost less
        lazy = True
    else:
        # compiled eagerly, long repeats cost seconds; llguidance builds only the states that a text reaches. But where it
        # needs rules, each mask is parsed anew: 140 ms for 60 rules, against 1.3 ms
        limit = _LAZY_CHOICE_POSITIONS if guide.guide_type is GuideType.CHOICE else _LAZY_POSITIONS
        lazy = num_written_positions(guide) > limit and is_regular(guide)
    if lazy and "llguidance" in names:
        names.remove("llguidance")
        names.insert(0, "llguidance")
    return names


def _refusal(name: str, guide: Guide, problems: list[Problem]) -> UnsupportedGuideError:
    first = problems[0]
    more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
    return UnsupportedGuideError(
        f"{first.pointer}: {name} cannot enforce {first.keyword}: {first.message}{more}",
        pointer=first.pointer,
        keyword=first.keyword,
        hint="change the construct, use another backend, or pass strict=False to drop it"
        if guide.guide_type is GuideType.JSON_SCHEMA
        else "change the guide, or use another backend",
        reasons={name: first.message},
    )


def _no_backend(guide: Guide, refused: dict[str, GuideError], missing: dict[str, str]) -> UnsupportedGuideError:
    """What "auto" says when every backend refuses, or is not installed."""
    # a backend that refuses a place in the guide is nearer to taking it than one that refuses its kind
    first = min(refused.values(), key=lambda error: error.pointer in (None, "#"), default=None)
    pointer = first.pointer or "#" if first else "#"
    reasons = {name: _reason(name, error) for name, error in refused.items()} | missing
    detail = "; ".join(f"{name}: {reason.removeprefix(f'{pointer}: ')}" for name, reason in reasons.items())
    construct = first.keyword if first and first.keyword else f"this {guide.guide_type.value} guide"
    hint = "change or shorten the named construct"
    if guide.guide_type is GuideType.JSON_SCHEMA:
        hint = "change the named construct, or pass strict=False to drop what cannot be enforced"
        if "llguidance" in missing:
            # most keywords of JSON Schema are enforced through it
            hint = f"pip install 'gd_plugin[llguidance]', an engine that takes nearly all schemas; or {hint}"
    return UnsupportedGuideError(
        f"{pointer}: no allowed backend enforces {construct} ({detail})",
        pointer=pointer,
        keyword=first.keyword if first else None,
        hint=hint,
        reasons=reasons,
    )


def _reason(name: str, error: GuideError) -> str:
    """Return why one backend refuses, its place in front."""
    known = error.reasons.get(name) if isinstance(error, UnsupportedGuideError) else None
    reason = error.message if known is None else f"{error.pointer or '#'}: {known}"
    # its advice to use "auto" is of no use to who does
    return reason.replace("; use backend='auto'", "")


_shared_lock = threading.Lock()
_shared: OrderedDict[tuple[str, bool, GuidedDecodingConfig], GrammarMatcherFactory] = OrderedDict()


def shared_factory(vocabulary: Vocabulary, config: GuidedDecodingConfig) -> GrammarMatcherFactory:
    """Return the process's factory for this vocabulary and configuration, so that processors share compiled guides."""
    # without a tokenizer canonical forcing spells by the longest token
    key = (vocabulary.fingerprint, vocabulary.encode is None, config)
    with _shared_lock:
        factory = _shared.get(key)
        if factory is None:
            factory = GrammarMatcherFactory(vocabulary, config=config)
            _shared[key] = factory
        _shared.move_to_end(key)
        while len(_shared) > _SHARED_FACTORIES:
            _shared.popitem(last=False)
    return factory
