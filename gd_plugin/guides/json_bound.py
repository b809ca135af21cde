r"""How long is a completion of a JSON document, at worst, from anywhere in it?

In:  a schema in normal form, what a text costs in tokens.      Out: tokens, or None where no bound is proven.
The bound is one on the completion that gd_plugin.grammars.closing finds, and so on the shortest one.

Proof. The search takes what is forced; inside a string that may end, the quote; otherwise the first that is legal of
`}` `]` `,` `:`; otherwise the byte it has taken least, in a fixed order with `"` and `0` in front; white space and `\` only
where nothing else is legal. Take a document of the schemas below, begun in any legal way.
- A word (literal, enumerated text, key) is finite: whatever bytes are taken, it ends within its longest spelling. Behind a
  backslash at most 11 bytes belong to the escape that has begun (`\ud83d\ude00`).
- A string of any characters takes one byte for each character that it still must have, and then the quote.
- An integer is a member as soon as its digits have reached its bounds, which takes no more digits than those have. What
  has begun with a point or an exponent has at most 14 digits that are not 0 and 2 of an exponent; a second 0 is not taken
  before the exponent, which has been taken less. A number without bounds needs a digit at most.
- Behind a member or an item the bracket is taken as soon as it is legal, so each declared key and each item that must be
  there is written at most once more. Members and items that are closed cost nothing more, and one alone is open.
So a value begun anywhere costs its closing, all that it may still hold from the start (`fresh`), and one child begun
anywhere (`begun`); of alternatives the dearest counts. A schema that contains itself has no bound.
Any spelling of a legal text in tokens is legal, so that pieces may be counted apart.
"""

import json
from collections.abc import Callable

from gd_plugin.guides.schema.languages import Chars, Language, Repeat, Words
from gd_plugin.guides.schema.numbers import Numbers
from gd_plugin.guides.schema.shapes import ArrayShape, Literal, Normal, NumberShape, ObjectShape, Shape, TextShape

__all__ = ["json_bound"]

# bytes of a number that has begun with a point or an exponent
_ODD_NUMBER = 24
# bytes behind a backslash
_ESCAPE = 11
# a search is cut off at more bytes
_MAX_BYTES = 2_000
# nested values that are looked through
_MAX_DEPTH = 64
# what a string must allow for the search to see that it is one
_TELLTALES = frozenset(map(ord, "Z~:}"))


class _Unbounded(Exception):
    """No bound is proven."""


def json_bound(normal: Normal, cost: Callable[[bytes], int | None]) -> int | None:
    """Return the tokens that complete any document begun by the schema, the stop token left out, or None.

    Args:
        normal: the schema.
        cost: tokens that spell a text, None if none do.
    """
    try:
        return _Bound(normal, cost).begun(0, ())
    except _Unbounded:
        return None


class _Bound:
    def __init__(self, normal: Normal, cost: Callable[[bytes], int | None]) -> None:
        self._nodes = normal.nodes
        self._cost = cost
        self._fresh: dict[int, int] = {}
        self._begun: dict[int, int] = {}

    def fresh(self, node: int, path: tuple[int, ...]) -> int:
        """Return what a value of `node` costs that has not begun."""
        return self._of_node(node, path, self._fresh, self._fresh_shape)

    def begun(self, node: int, path: tuple[int, ...]) -> int:
        """Return what a value of `node` costs that may have begun."""
        return self._of_node(node, path, self._begun, self._begun_shape)

    def _of_node(
        self,
        node: int,
        path: tuple[int, ...],
        known: dict[int, int],
        of_shape: Callable[[Shape, tuple[int, ...]], int],
    ) -> int:
        if node in path or len(path) > _MAX_DEPTH:
            raise _Unbounded
        if node not in known:
            found = max(of_shape(shape, (*path, node)) for shape in self._nodes[node])
            if found > _MAX_BYTES:
                raise _Unbounded
            known[node] = found
        return known[node]

    def _fresh_shape(self, shape: Shape, path: tuple[int, ...]) -> int:
        if isinstance(shape, Literal):
            return len(shape.word)
        if isinstance(shape, NumberShape):
            digits = _num_digits(shape.numbers)
            # a sign and a digit, whichever has been taken least
            return 2 if _has_zero(shape.numbers) else digits + _ODD_NUMBER
        if isinstance(shape, TextShape):
            return _text(shape.language)
        return 2 + self._children(shape, path)

    def _begun_shape(self, shape: Shape, path: tuple[int, ...]) -> int:
        if isinstance(shape, Literal):
            return len(shape.word)
        if isinstance(shape, NumberShape):
            return _num_digits(shape.numbers) + _ODD_NUMBER
        if isinstance(shape, TextShape):
            return _text(shape.language) + _ESCAPE
        if isinstance(shape, ArrayShape):
            nodes = {*shape.prefix, *(() if shape.rest is None else (shape.rest,))}
            return 2 + self._children(shape, path) + max((1 + self.begun(node, path) for node in nodes), default=0)
        keys = [len(_spelled(key)) + _ESCAPE + 2 for key, _, _ in shape.declared]
        keys += [_text(extra.keys) + _ESCAPE + 2 for extra in shape.extras]
        nodes = {*(node for _, node, _ in shape.declared), *(extra.node for extra in shape.extras)}
        # the open member: its key, or its value
        member = max(keys, default=0) + max((self.begun(node, path) for node in nodes), default=0)
        return 2 + self._children(shape, path) + member

    def _children(self, shape: Shape, path: tuple[int, ...]) -> int:
        """Return what the members and items cost that the search may write from their start."""
        if isinstance(shape, ArrayShape):
            if shape.contains is not None or shape.choices is not None:
                raise _Unbounded
            nodes = list(shape.prefix[: shape.low])
            if shape.rest is not None:
                nodes += [shape.rest] * min(max(shape.low - len(shape.prefix), 0), _MAX_BYTES)
            return sum(2 + self.fresh(node, path) for node in nodes)
        if not isinstance(shape, ObjectShape) or shape.low or (shape.extras and (shape.declared or shape.wanted)):
            # keys that nobody has named might be taken again and again
            raise _Unbounded
        if not any(must for _, _, must in shape.declared):
            return 0
        return sum(self._key(key) + self.fresh(node, path) for key, node, _ in shape.declared)

    def _key(self, key: str) -> int:
        """Return what a key costs with the punctuation around it, with or without a blank."""
        costs = [self._cost(text % _spelled(key)) for text in (b', "%b": ', b',"%b":')]
        known = [cost for cost in costs if cost is not None]
        if len(known) < len(costs):
            raise _Unbounded
        return max(known)


def _spelled(text: str) -> bytes:
    return json.dumps(text, ensure_ascii=False)[1:-1].encode("utf-8", "surrogatepass")


def _text(language: Language) -> int:
    """Return the bytes of a string that has not begun, quotes included."""
    if isinstance(language, Words):
        return 2 + max(len(_spelled(word)) for word in language.members)
    if isinstance(language, Repeat) and isinstance(language.part, Chars):
        ranges = language.part.ranges
        if all(any(low <= code <= high for low, high in ranges) for code in _TELLTALES):
            return 2 + language.low
    raise _Unbounded


def _has_zero(numbers: Numbers) -> bool:
    low, high = numbers.low, numbers.high
    return not (
        (low is not None and (low > 0 or (low == 0 and numbers.low_open)))
        or (high is not None and (high < 0 or (high == 0 and numbers.high_open)))
    )


def _num_digits(numbers: Numbers) -> int:
    """Return the digits of the bounds."""
    bounds = [bound for bound in (numbers.low, numbers.high) if bound is not None]
    if numbers.values is not None or numbers.multiple is not None or numbers.excluded or numbers.not_multiples:
        raise _Unbounded
    if bounds and numbers.integer is not True:
        raise _Unbounded
    return max((len(str(abs(int(bound)))) + 1 for bound in bounds), default=0)
