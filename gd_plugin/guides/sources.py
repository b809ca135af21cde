"""Types -> JSON Schema, by way of pydantic, which is imported only when a type arrives."""

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
            "a type needs pydantic to become a schema: pip install pydantic, or pass the schema as a dict"
        ) from error
    if isinstance(tp, list | tuple | set | dict | int | float | bytes) or tp is None:
        raise InvalidGuideError(
            f"a schema is a dict, JSON text or a type, got the {type(tp).__name__} {str(tp)[:40]!r}; "
            "for fixed values use Guide.choice or typing.Literal"
        )
    fields = getattr(type(tp), "model_fields", None) or getattr(type(tp), "__dataclass_fields__", None)
    if fields is not None and not isinstance(tp, type):
        name = type(tp).__name__
        raise InvalidGuideError(f"got an instance of {name}; pass the class {name} itself")
    try:
        schema: dict[str, Any] = TypeAdapter(tp).json_schema(by_alias=True, mode="validation")
    except (PydanticUserError, PydanticSchemaGenerationError, TypeError, RecursionError, NameError) as error:
        first_line = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise InvalidGuideError(
            f"{getattr(tp, '__name__', tp)!s} has no JSON Schema: {first_line}",
            hint="give the fields types that JSON can hold, or pass a schema as a dict",
        ) from error
    return schema
