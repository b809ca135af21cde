"""The tree of errors: bases, attributes, pickling."""

import ast
import pickle
from collections.abc import Iterator
from pathlib import Path

import pytest

import gd_plugin
from gd_plugin import errors

CLASSES = [getattr(errors, name) for name in errors.__all__]
BUILTIN_BASES = {
    "GuideError": ValueError,
    "VocabularyError": ValueError,
    "RollbackError": ValueError,
    "BackendNotInstalledError": ImportError,
}
ATTRIBUTES: dict[str, dict[str, object]] = {
    "GuideError": {"pointer": "#/a", "keyword": "k", "hint": "h"},
    "InvalidGuideError": {"pointer": "line 1, column 2", "keyword": None, "hint": None},
    "UnsatisfiableGuideError": {"pointer": "#", "keyword": None, "hint": None},
    "UnsupportedGuideError": {"pointer": "#/a", "keyword": "not", "hint": "h", "reasons": {"xgrammar": "no"}},
    "GuideTooLargeError": {"pointer": None, "keyword": None, "hint": None, "limit": "max_depth", "value": 65},
    "CompileTimeoutError": {"seconds": 1.5},
    "DeadEndError": {"row": 1, "num_tokens": 2, "text": "x"},
    "TokenRejectedError": {"row": 1, "request_id": "r", "token_id": 7, "num_tokens": 2},
}


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_every_class_survives_pickling(cls: type[Exception]) -> None:
    attributes = ATTRIBUTES.get(cls.__name__, {})
    error = cls("what, where, what to do", **attributes)
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        twin = pickle.loads(pickle.dumps(error, protocol))
        assert type(twin) is cls and str(twin) == str(error)
        assert {name: getattr(twin, name) for name in attributes} == attributes
    cls()


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_every_class_is_below_the_root(cls: type[Exception]) -> None:
    assert issubclass(cls, errors.GuidedDecodingError)
    assert issubclass(cls, BUILTIN_BASES.get(cls.__name__, Exception))


def test_all_names_every_class() -> None:
    found = {n for n, v in vars(errors).items() if isinstance(v, type) and issubclass(v, errors.GuidedDecodingError)}
    assert sorted(found) == sorted(errors.__all__)


def test_guide_errors_are_one_kind() -> None:
    for name in ("InvalidGuideError", "UnsupportedGuideError", "UnsatisfiableGuideError", "GuideTooLargeError"):
        assert issubclass(getattr(errors, name), errors.GuideError)


def test_the_hint_stands_behind_the_message_once() -> None:
    error = errors.GuideError("#/a: not a number", pointer="#/a", hint="write a number")
    assert str(error) == "#/a: not a number; write a number"
    assert error.message == "#/a: not a number"
    outer = errors.InvalidGuideError(f"#/tags/0: {error}", hint=error.hint)
    assert str(outer) == "#/tags/0: #/a: not a number; write a number"
    assert str(errors.GuideError("no hint")) == "no hint" and str(errors.GuideError()) == ""


def test_a_place_put_around_an_error_keeps_the_rest() -> None:
    error = errors.GuideTooLargeError("#: too deep", pointer="#", limit="max_depth", value=65, hint="flatten it")
    placed = error.placed("#/tags/0: too deep", "#/tags/0")
    assert type(placed) is errors.GuideTooLargeError
    assert vars(placed) == vars(error) | {"pointer": "#/tags/0"}
    assert str(placed) == "#/tags/0: too deep; flatten it"
    assert error.pointer == "#"


GUIDE_ERRORS = {name for name in errors.__all__ if issubclass(getattr(errors, name), errors.GuideError)}


def guide_errors_made() -> Iterator[tuple[str, ast.Call]]:
    """Every place in the package that makes an error of a guide."""
    package = Path(gd_plugin.__file__).parent
    for path in sorted(package.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in GUIDE_ERRORS:
                yield f"{path.relative_to(package)}:{node.lineno}", node


def test_every_error_of_a_guide_says_what_to_do() -> None:
    places = dict(guide_errors_made())
    assert len(places) > 100
    for place, call in places.items():
        [hint] = [word.value for word in call.keywords if word.arg == "hint"] or [None]
        assert hint is not None, f"{place}: no hint"
        assert not (isinstance(hint, ast.Constant) and not hint.value), f"{place}: the hint is empty"
