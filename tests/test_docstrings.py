"""Docstrings of the public names say what types cannot: arguments, what is raised, shapes of tensors, units of numbers."""

import builtins
import inspect
import re
from collections.abc import Iterator
from typing import Any

import pytest

import gd_plugin
from gd_plugin import errors

# tensors are described by letters: B rows, N columns, V vocabulary, W words, K drafts, L tokens
SHAPE = re.compile(r"\[[^\]]*\]|shape|scalar|a row|one-dimensional", flags=re.IGNORECASE)
UNIT = {"_s": "second", "_bytes": "byte"}


def callables() -> Iterator[tuple[str, Any]]:
    """Public functions, classes, and the methods that the classes define themselves."""
    for name in gd_plugin.__all__:
        value = getattr(gd_plugin, name)
        if not callable(value):
            continue
        yield name, value
        if inspect.isclass(value):
            for member_name, member in vars(value).items():
                if not member_name.startswith("_"):
                    function = inspect.unwrap(getattr(member, "__func__", getattr(member, "fget", member)))
                    if inspect.isfunction(function):
                        yield f"{name}.{member_name}", function


CALLABLES = dict(callables())


def docstring(name: str) -> str:
    return inspect.getdoc(CALLABLES[name]) or ""


def documentation(name: str) -> str:
    """The docstring, and the one it refers to."""
    text = docstring(name)
    referred = re.match(r"See `(\w+\.\w+)`", text)
    return text + docstring(referred[1]) if referred and referred[1] in CALLABLES else text


@pytest.mark.parametrize("name", CALLABLES)
def test_it_says_what_it_does(name: str) -> None:
    first = docstring(name).partition("\n")[0]
    assert len(first) > 10 and first.endswith((".", ":")), first


@pytest.mark.parametrize("name", CALLABLES)
def test_it_names_what_it_raises(name: str) -> None:
    """Every class that a function raises itself is in its Raises section."""
    value = CALLABLES[name]
    if inspect.isclass(value):
        if issubclass(value, BaseException):
            return
        # a dataclass's own __init__ has no source, and raises nothing
        makers = [vars(value).get(maker) for maker in ("__init__", "__post_init__")]
        source = "".join(inspect.getsource(m) for m in makers if m and m.__code__.co_filename != "<string>")
    else:
        source = inspect.getsource(value)
    raised = set(re.findall(r"^\s+raise (\w*(?:Error|Exception))\(", source, flags=re.MULTILINE))
    said = re.findall(r"\w+Error", documentation(name).partition("Raises:")[2])
    for kind in raised - {"NotImplementedError"}:
        classes = [base.__name__ for base in error_class(kind).__mro__ if base.__name__.endswith("Error")]
        assert set(classes) & set(said), f"{name} raises {kind}, and says {said}"


def error_class(name: str) -> type[BaseException]:
    found: type[BaseException] = getattr(errors, name, None) or getattr(builtins, name)
    return found


@pytest.mark.parametrize("name", CALLABLES)
def test_tensors_have_shapes_and_numbers_units(name: str) -> None:
    value = CALLABLES[name]
    try:
        signature = inspect.signature(value)
    except (TypeError, ValueError):
        return
    text = documentation(name)
    hints = {key: str(parameter.annotation) for key, parameter in signature.parameters.items()}
    if any(re.search(r"\bTensor\b", hint) for hint in hints.values()):
        assert SHAPE.search(text), f"{name}: the shape of its tensors"
    for key, hint in hints.items():
        for ending, unit in UNIT.items():
            if key.endswith(ending) and hint in {"<class 'int'>", "<class 'float'>", "int", "float"}:
                assert unit in text, f"{name}: the unit of {key}"
