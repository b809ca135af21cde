"""Types -> JSON Schema, by way of pydantic, which is imported only when a type arrives."""

import types
import typing
from typing import Any

from gd_plugin.errors import InvalidGuideError

__all__ = ["schema_from_type"]


def schema_from_type(tp: Any) -> dict[str, Any]:
    """Return the JSON Schema of a pydantic model, dataclass, TypedDict, Enum, Literal, or any type pydantic describes.

    Raises:
        InvalidGuideError: an instance instead of a type, a type without a schema, or pydantic is missing.
    """
    try:
        from pydantic import PydanticSchemaGenerationError, PydanticUserError, TypeAdapter
    except ImportError as error:
        raise InvalidGuideError(
            "#: a type needs pydantic to become a schema",
            pointer="#",
            hint="pip install pydantic, or pass the schema as a dict",
        ) from error
    if isinstance(tp, list | tuple | set | dict | int | float | bytes) or tp is None:
        raise InvalidGuideError(
            f"#: a schema is a dict, JSON text or a type, got the {type(tp).__name__} {str(tp)[:40]!r}",
            pointer="#",
            hint="for fixed values use Guide.choice or typing.Literal",
        )
    fields = getattr(type(tp), "model_fields", None) or getattr(type(tp), "__dataclass_fields__", None)
    if fields is not None and not isinstance(tp, type):
        name = type(tp).__name__
        raise InvalidGuideError(f"#: got an instance of {name}", pointer="#", hint=f"pass the class {name} itself")
    try:
        schema: dict[str, Any] = TypeAdapter(_readable(tp)).json_schema(by_alias=True, mode="validation")
    except (PydanticUserError, PydanticSchemaGenerationError, TypeError, RecursionError, NameError) as error:
        first_line = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise InvalidGuideError(
            f"#: {getattr(tp, '__name__', tp)!s} has no JSON Schema: {first_line}",
            pointer="#",
            hint="give the fields types that JSON can hold, or pass a schema as a dict",
        ) from error
    return schema


def _readable(tp: Any) -> Any:
    """Return `tp` with every TypedDict of `typing` replaced: pydantic takes those only from Python 3.12 on."""
    if typing.is_typeddict(tp) and type(tp).__module__ == "typing":
        from typing_extensions import TypedDict

        fields = {}
        for name, hint in typing.get_type_hints(tp, include_extras=True).items():
            if typing.get_origin(hint) in (typing.Required, typing.NotRequired):
                [hint] = typing.get_args(hint)
            fields[name] = _readable(hint) if name in tp.__required_keys__ else typing.NotRequired[_readable(hint)]
        return TypedDict(tp.__name__, fields)  # type: ignore[operator]
    arguments = typing.get_args(tp)
    readable = tuple(_readable(argument) for argument in arguments)
    if all(a is b for a, b in zip(arguments, readable, strict=True)):
        return tp
    if isinstance(tp, types.UnionType):
        return typing.Union[readable]  # noqa: UP007
    return tp.copy_with(readable) if hasattr(tp, "copy_with") else typing.get_origin(tp)[readable]
