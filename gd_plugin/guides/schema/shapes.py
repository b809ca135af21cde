"""The normal form: a graph of nodes, each a union of shapes, each a set of values of one JSON type.

`Normal.nodes[k]` are the alternatives of node k; children are node numbers. Node 0 is the root. What no alternative
contains is not generated. There are no references, negations or intersections left, except inside languages.
"""

from dataclasses import dataclass, field

from gd_plugin.guides.problem import Problem
from gd_plugin.guides.schema.languages import Language
from gd_plugin.guides.schema.numbers import Numbers

__all__ = ["ArrayShape", "Contains", "Extra", "Literal", "Normal", "NumberShape", "ObjectShape", "Shape", "TextShape"]


@dataclass(frozen=True, slots=True)
class Literal:
    """`null`, `true` or `false`."""

    word: str


@dataclass(frozen=True, slots=True)
class NumberShape:
    """Numbers of a set."""

    numbers: Numbers


@dataclass(frozen=True, slots=True)
class TextShape:
    """Texts of a language."""

    language: Language


@dataclass(frozen=True, slots=True)
class Contains:
    """Between `low` and `high` items are of node `node`, and the others of node `others` (None: any item counts)."""

    node: int
    low: int
    high: int | None
    others: int


@dataclass(frozen=True, slots=True)
class ArrayShape:
    """Arrays: items at fixed places, then any number of `rest` (None: no more), `low` to `high` in all.

    Attributes:
        choices: with `unique`, the finite values an item can be, as nodes; each is used at most once.
    """

    prefix: tuple[int, ...]
    rest: int | None
    low: int
    high: int | None
    contains: Contains | None = None
    choices: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class Extra:
    """Keys of a language that are not declared, and the node of their values.

    Attributes:
        marks: bits of what is asked for and this key is.
    """

    keys: Language
    node: int
    marks: int = 0


@dataclass(frozen=True, slots=True)
class ObjectShape:
    """Objects: declared keys in order, each at most once; between them, keys of `extras`.

    Attributes:
        declared: key, node of its value, whether it must be there.
        extras: languages of other keys; they do not overlap each other or the declared keys.
        low, high: members in all.
        wanted: bits that must be among the marks of the extra keys that are there.
        pointer: where the schema declares its keys, or the first of several such places.
    """

    declared: tuple[tuple[str, int, bool], ...]
    extras: tuple[Extra, ...]
    low: int
    high: int | None
    wanted: int = 0
    pointer: str = field(default="#", compare=False)


Shape = Literal | NumberShape | TextShape | ArrayShape | ObjectShape


@dataclass(frozen=True, slots=True)
class Normal:
    """A schema in normal form.

    Attributes:
        nodes: node number -> its alternatives.
        dropped: what was left out because the caller passed `strict=False`.
    """

    nodes: tuple[tuple[Shape, ...], ...]
    dropped: tuple[Problem, ...] = ()
