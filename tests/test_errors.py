"""The tree of errors: bases, attributes, pickling."""

import pickle

import pytest

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
        assert type(twin) is cls and str(twin) == "what, where, what to do"
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
