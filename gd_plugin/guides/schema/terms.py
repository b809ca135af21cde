"""What a conjunction is made of: atoms that narrow one JSON type, schemas still to be read, and choices.

A conjunction is a tuple of terms; all of them hold. Terms are hashable, so equal conjunctions are one node of the graph.
"""

from dataclasses import dataclass, field

from gd_plugin.guides.schema.languages import Language
from gd_plugin.guides.schema.numbers import Numbers

__all__ = [
    "ALL_TYPES",
    "NEVER",
    "Bools",
    "Choice",
    "Conjunction",
    "ContainsItem",
    "ItemCount",
    "Items",
    "KeyOutside",
    "Keys",
    "MemberCount",
    "Members",
    "Num",
    "Refuse",
    "Required",
    "SchemaTerm",
    "Term",
    "Text",
    "Types",
    "Unevaluated",
    "Unique",
    "without_type",
]

ALL_TYPES = frozenset({"null", "boolean", "number", "string", "array", "object"})


@dataclass(frozen=True, slots=True)
class SchemaTerm:
    """A subschema by number, to hold or (`positive` False) not to hold.

    Attributes:
        scopes: schemas with unevaluated* keywords that see what it evaluates.
    """

    index: int
    positive: bool = True
    scopes: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Types:
    """The value has one of these types."""

    names: frozenset[str]


@dataclass(frozen=True, slots=True)
class Bools:
    """A boolean is one of these."""

    values: frozenset[bool]


@dataclass(frozen=True, slots=True)
class Num:
    """A number is a member of the set."""

    numbers: Numbers
    pointer: str = ""


@dataclass(frozen=True, slots=True)
class Text:
    """A string is a member of the language.

    Attributes:
        wide: where dialects read a pattern differently, the texts that some of them take; None is `language`.
    """

    language: Language
    wide: Language | None = None


@dataclass(frozen=True, slots=True)
class Items:
    """An array's items, by place, and those behind (None: nothing is said)."""

    prefix: tuple["Conjunction", ...]
    rest: "Conjunction | None"
    scopes: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class ItemCount:
    """An array has `low` to `high` items."""

    low: int = 0
    high: int | None = None


@dataclass(frozen=True, slots=True)
class ContainsItem:
    """An array has `low` to `high` items for which `item` holds; for the others `other` does."""

    item: "Conjunction"
    other: "Conjunction"
    low: int
    high: int | None
    pointer: str


@dataclass(frozen=True, slots=True)
class Unique:
    """No two items of an array are equal."""

    pointer: str


@dataclass(frozen=True, slots=True)
class Members:
    """An object's values, by key, by pattern, and for all other keys (None: nothing is said).

    Attributes:
        declares: it comes from keywords that a schema's author wrote, so keys it names count as declared.
        pointer: the place of those keywords.
    """

    named: tuple[tuple[str, "Conjunction"], ...]
    patterns: tuple[tuple[str, "Conjunction"], ...] = ()
    additional: "Conjunction | None" = None
    scopes: tuple[int, ...] = ()
    declares: bool = True
    pointer: str = field(default="#", compare=False)


@dataclass(frozen=True, slots=True)
class Required:
    """An object has these keys."""

    keys: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class MemberCount:
    """An object has `low` to `high` members."""

    low: int = 0
    high: int | None = None
    pointer: str = ""


@dataclass(frozen=True, slots=True)
class Keys:
    """Every key of an object is a string for which `conjunction` holds."""

    conjunction: "Conjunction"


@dataclass(frozen=True, slots=True)
class KeyOutside:
    """An object has a key of the language, or one for which `conjunction` holds."""

    language: Language | None
    pointer: str
    keyword: str
    conjunction: "Conjunction" = ()


@dataclass(frozen=True, slots=True)
class Unevaluated:
    """What a schema's unevaluatedProperties or unevaluatedItems says of what it and its parts do not evaluate.

    Attributes:
        scope: the schema.
        scopes: schemas around it with such keywords, for which all is evaluated then.
    """

    keyword: str
    scope: int
    conjunction: "Conjunction"
    pointer: str
    scopes: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Refuse:
    """A keyword that cannot be brought into normal form, if a value of the type is still possible."""

    type_name: str
    pointer: str
    keyword: str
    message: str


@dataclass(frozen=True, slots=True)
class Choice:
    """One of the conjunctions holds."""

    options: tuple["Conjunction", ...]


Term = (
    SchemaTerm
    | Types
    | Bools
    | Num
    | Text
    | Items
    | ItemCount
    | ContainsItem
    | Unique
    | Members
    | Required
    | MemberCount
    | Keys
    | KeyOutside
    | Unevaluated
    | Refuse
    | Choice
)
Conjunction = tuple[Term, ...]
NEVER: Conjunction = (Types(frozenset()),)


def without_type(name: str) -> Types:
    """Any value but one of type `name`."""
    return Types(ALL_TYPES - {name})
