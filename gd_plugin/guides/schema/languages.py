"""Regular languages over code points, closed under intersection and complement.

In:  patterns, lengths, formats, fixed strings and number ranges, built with the functions below.
Out: `Language` values that can be searched for a member (`matches`, `is_empty`) and written as grammar terminals.
Nodes are immutable and simplified as they are built. Matching uses derivatives.
Source: Brzozowski, "Derivatives of Regular Expressions", JACM 11(4), 1964.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import lru_cache

__all__ = [
    "ANY_CHAR",
    "ANY_TEXT",
    "EMPTY",
    "EPSILON",
    "Alt",
    "And",
    "Cat",
    "Chars",
    "Language",
    "Not",
    "Ranges",
    "Repeat",
    "Words",
    "alt",
    "both",
    "cat",
    "chars",
    "complement_ranges",
    "derive",
    "first_points",
    "is_empty",
    "length_bounds",
    "matches",
    "negate",
    "repeat",
    "text",
    "weight",
    "words",
]

Ranges = tuple[tuple[int, int], ...]

MAX_CODE_POINT = 0x10FFFF
_SURROGATES = (0xD800, 0xDFFF)


@dataclass(frozen=True, slots=True)
class Language:
    """Base of all nodes. `nullable` says whether the empty text is a member."""

    nullable: bool = field(init=False, default=False, compare=False)
    _hash: int = field(init=False, default=0, compare=False, repr=False)

    def __hash__(self) -> int:
        return self._hash


def _seal(node: Language, nullable: bool, *parts: object) -> None:
    object.__setattr__(node, "nullable", nullable)
    object.__setattr__(node, "_hash", hash((type(node).__name__, *parts)))


@dataclass(frozen=True, slots=True, eq=True)
class Chars(Language):
    """One code point out of sorted, disjoint, inclusive ranges; surrogates are never members."""

    ranges: Ranges

    def __post_init__(self) -> None:
        _seal(self, False, self.ranges)

    __hash__ = Language.__hash__


@dataclass(frozen=True, slots=True, eq=True)
class Words(Language):
    """A finite set of texts. The empty set is the empty language."""

    members: frozenset[str]

    def __post_init__(self) -> None:
        _seal(self, "" in self.members, self.members)

    __hash__ = Language.__hash__


@dataclass(frozen=True, slots=True, eq=True)
class Cat(Language):
    """The parts one behind the other."""

    parts: tuple[Language, ...]

    def __post_init__(self) -> None:
        _seal(self, all(part.nullable for part in self.parts), self.parts)

    __hash__ = Language.__hash__


@dataclass(frozen=True, slots=True, eq=True)
class Alt(Language):
    """Any of the parts."""

    parts: tuple[Language, ...]

    def __post_init__(self) -> None:
        _seal(self, any(part.nullable for part in self.parts), self.parts)

    __hash__ = Language.__hash__


@dataclass(frozen=True, slots=True, eq=True)
class And(Language):
    """All of the parts at once."""

    parts: tuple[Language, ...]

    def __post_init__(self) -> None:
        _seal(self, all(part.nullable for part in self.parts), self.parts)

    __hash__ = Language.__hash__


@dataclass(frozen=True, slots=True, eq=True)
class Not(Language):
    """Every text that `part` does not contain."""

    part: Language

    def __post_init__(self) -> None:
        _seal(self, not self.part.nullable, self.part)

    __hash__ = Language.__hash__


@dataclass(frozen=True, slots=True, eq=True)
class Repeat(Language):
    """`part` between `low` and `high` times; `high` None has no limit."""

    part: Language
    low: int
    high: int | None

    def __post_init__(self) -> None:
        _seal(self, self.low == 0 or self.part.nullable, self.part, self.low, self.high)

    __hash__ = Language.__hash__


EMPTY = Words(frozenset())
EPSILON = Words(frozenset({""}))
ANY_CHAR = Chars(((0, _SURROGATES[0] - 1), (_SURROGATES[1] + 1, MAX_CODE_POINT)))
ANY_TEXT = Repeat(ANY_CHAR, 0, None)


def chars(ranges: Iterable[tuple[int, int]]) -> Language:
    """One code point of `ranges`, which may overlap and stand in any order."""
    return _chars(tuple(ranges))


@lru_cache(maxsize=2048)
def _chars(ranges: Ranges) -> Language:
    merged: list[tuple[int, int]] = []
    for low, high in sorted(ranges):
        for a, b in ((low, min(high, _SURROGATES[0] - 1)), (max(low, _SURROGATES[1] + 1), high)):
            if a > b:
                continue
            if merged and a <= merged[-1][1] + 1:
                merged[-1] = (merged[-1][0], max(b, merged[-1][1]))
            else:
                merged.append((a, b))
    if len(merged) == 1 and merged[0][0] == merged[0][1]:
        return text(chr(merged[0][0]))
    return Chars(tuple(merged)) if merged else EMPTY


def complement_ranges(ranges: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """All code points outside `ranges`."""
    result, start = [], 0
    for low, high in sorted(ranges):
        if low > start:
            result.append((start, low - 1))
        start = max(start, high + 1)
    if start <= MAX_CODE_POINT:
        result.append((start, MAX_CODE_POINT))
    return result


def text(value: str) -> Language:
    """Exactly `value`."""
    return Words(frozenset({value}))


def words(values: Iterable[str]) -> Language:
    """Any of `values`."""
    return Words(frozenset(values))


def cat(*parts: Language) -> Language:
    """The parts one behind the other."""
    flat: list[Language] = []
    for part in parts:
        for piece in part.parts if isinstance(part, Cat) else (part,):
            if piece == EMPTY:
                return EMPTY
            if piece == EPSILON:
                continue
            last = flat[-1] if flat else None
            if isinstance(piece, Words) and isinstance(last, Words) and len(piece.members) == len(last.members) == 1:
                flat[-1] = text(next(iter(last.members)) + next(iter(piece.members)))
                continue
            flat.append(piece)
    if not flat:
        return EPSILON
    return flat[0] if len(flat) == 1 else Cat(tuple(flat))


def alt(*parts: Language) -> Language:
    """Any of the parts."""
    found: dict[Language, None] = {}
    members: set[str] = set()
    for part in parts:
        for piece in part.parts if isinstance(part, Alt) else (part,):
            if isinstance(piece, Words):
                members |= piece.members
            elif piece == ANY_TEXT:
                return ANY_TEXT
            else:
                found[piece] = None
    pieces = list(found)
    # the empty text adds nothing beside a part that holds it
    if members == {""} and any(piece.nullable for piece in pieces):
        members = set()
    if members:
        pieces.append(Words(frozenset(members)))
    if not pieces:
        return EMPTY
    return pieces[0] if len(pieces) == 1 else Alt(tuple(pieces))


def both(*parts: Language) -> Language:
    """Texts that all parts contain."""
    found: dict[Language, None] = {}
    members: frozenset[str] | None = None
    for part in parts:
        for piece in part.parts if isinstance(part, And) else (part,):
            if isinstance(piece, Words):
                members = piece.members if members is None else members & piece.members
            elif piece != ANY_TEXT:
                found[piece] = None
    pieces = list(found)
    if members is not None and sum(map(weight, pieces)) * sum(map(len, members)) > 20 * _MAX_WORK:
        return And((*pieces, Words(members)))
    if members is not None:
        return words(word for word in members if all(matches(piece, word) for piece in pieces))
    pieces = _merge_lengths(pieces)
    if not pieces:
        return ANY_TEXT
    if any(isinstance(piece, Not) and piece.part in found for piece in pieces):
        return EMPTY
    low, high = 0, None
    for piece in pieces:
        least, most = length_bounds(piece)
        low = max(low, least)
        high = most if high is None else high if most is None else min(high, most)
    if high is not None and low > high:
        return EMPTY
    return pieces[0] if len(pieces) == 1 else And(tuple(pieces))


def _merge_lengths(pieces: list[Language]) -> list[Language]:
    lengths = [piece for piece in pieces if isinstance(piece, Repeat) and piece.part == ANY_CHAR]
    if len(lengths) < 2:
        return pieces
    low = max(piece.low for piece in lengths)
    highs = [piece.high for piece in lengths if piece.high is not None]
    merged = repeat(ANY_CHAR, low, min(highs) if highs else None)
    return [*(piece for piece in pieces if piece not in lengths), merged]


def negate(part: Language) -> Language:
    """Every text outside `part`."""
    if isinstance(part, Not):
        return part.part
    if part == ANY_TEXT:
        return EMPTY
    if part == EMPTY:
        return ANY_TEXT
    return Not(part)


def repeat(part: Language, low: int, high: int | None) -> Language:
    """`part` between `low` and `high` times."""
    if high is not None and low > high:
        return EMPTY
    if high == 0 or part == EPSILON:
        return EPSILON
    if part == EMPTY:
        return EPSILON if low == 0 else EMPTY
    if low == 1 and high == 1:
        return part
    if isinstance(part, Repeat) and part.low == 0 and part.high is None and low <= 1 and (high is None or high >= 1):
        return part
    return Repeat(part, low, high)


@lru_cache(maxsize=8192)
def length_bounds(node: Language) -> tuple[int, int | None]:
    """Least and greatest number of code points of a member; a bound, not always reached."""
    if isinstance(node, Chars):
        return 1, 1
    if isinstance(node, Words):
        lengths = [len(word) for word in node.members]
        return (min(lengths), max(lengths)) if lengths else (1, 0)
    if isinstance(node, Cat):
        bounds = [length_bounds(part) for part in node.parts]
        most = [high for _, high in bounds]
        return sum(low for low, _ in bounds), None if None in most else sum(high for high in most if high is not None)
    if isinstance(node, Alt):
        bounds = [length_bounds(part) for part in node.parts]
        most = [high for _, high in bounds]
        return min(low for low, _ in bounds), None if None in most else max(high for high in most if high is not None)
    if isinstance(node, And):
        bounds = [length_bounds(part) for part in node.parts]
        tops = [high for _, high in bounds if high is not None]
        return max(low for low, _ in bounds), min(tops) if tops else None
    if isinstance(node, Repeat):
        least, greatest = length_bounds(node.part)
        top = None if node.high is None or greatest is None else greatest * node.high
        return least * node.low, top
    return 0, None


@lru_cache(maxsize=8192)
def derive(node: Language, point: int) -> Language:
    """What may follow the code point `point` in members of `node`."""
    if isinstance(node, Chars):
        return EPSILON if any(low <= point <= high for low, high in node.ranges) else EMPTY
    if isinstance(node, Words):
        letter = chr(point)
        return words(word[1:] for word in node.members if word[:1] == letter)
    if isinstance(node, Cat):
        branches = []
        for index, part in enumerate(node.parts):
            branches.append(cat(derive(part, point), *node.parts[index + 1 :]))
            if not part.nullable:
                break
        return alt(*branches)
    if isinstance(node, Alt):
        return alt(*(derive(part, point) for part in node.parts))
    if isinstance(node, And):
        return both(*(derive(part, point) for part in node.parts))
    if isinstance(node, Not):
        return negate(derive(node.part, point))
    if not isinstance(node, Repeat):
        raise TypeError(f"not a language: {node!r}")
    high = None if node.high is None else node.high - 1
    return cat(derive(node.part, point), repeat(node.part, max(node.low - 1, 0), high))


def matches(node: Language, value: str) -> bool:
    """Whether `value` is a member."""
    if isinstance(node, Words):
        return value in node.members
    if isinstance(node, And):
        return all(matches(part, value) for part in node.parts)
    if isinstance(node, Alt):
        return any(matches(part, value) for part in node.parts)
    if isinstance(node, Not):
        return not matches(node.part, value)
    if isinstance(node, Repeat) and node.part == ANY_CHAR:
        return node.low <= len(value) and (node.high is None or len(value) <= node.high)
    for letter in value:
        node = derive(node, ord(letter))
        if node in (EMPTY, ANY_TEXT):
            break
    return node.nullable


def _first_sets(node: Language, sets: set[Ranges], letters: set[int]) -> None:
    """Collect the sets of characters that a member may begin with, and the first letters of its words."""
    if isinstance(node, Chars):
        sets.add(node.ranges)
    elif isinstance(node, Words):
        letters.update(ord(word[0]) for word in node.members if word)
    elif isinstance(node, Cat):
        for part in node.parts:
            _first_sets(part, sets, letters)
            if not part.nullable:
                break
    elif isinstance(node, Alt | And):
        for part in node.parts:
            _first_sets(part, sets, letters)
    elif isinstance(node, Not | Repeat):
        _first_sets(node.part, sets, letters)


def first_points(node: Language) -> list[int]:
    """One code point of each class of first characters that `node` tells apart."""
    sets: set[Ranges] = set()
    letters: set[int] = set()
    _first_sets(node, sets, letters)
    cuts = {0, _SURROGATES[1] + 1, *letters, *(letter + 1 for letter in letters)}
    for ranges in sets:
        for low, high in ranges:
            cuts.update((low, high + 1))
    points = [point for point in sorted(cuts) if point <= MAX_CODE_POINT and not _is_surrogate(point)]
    # intervals in the same sets are one class, of which one is enough
    members = [0] * len(points)
    for number, ranges in enumerate(sets):
        for low, high in ranges:
            for place in range(bisect_left(points, low), bisect_right(points, high)):
                members[place] |= 1 << number
    classes: dict[tuple[int, int | None], int] = {}
    for point, member in zip(points, members, strict=True):
        classes.setdefault((member, point if point in letters else None), point)
    return list(classes.values())


def _is_surrogate(point: int) -> bool:
    return _SURROGATES[0] <= point <= _SURROGATES[1]


@lru_cache(maxsize=8192)
def weight(node: Language) -> int:
    """Nodes and words of a language, shared parts counted each time."""
    if isinstance(node, Cat | Alt | And):
        return 1 + sum(weight(part) for part in node.parts)
    if isinstance(node, Not | Repeat):
        return 1 + weight(node.part)
    return len(node.members) if isinstance(node, Words) else 1


# languages over it are not searched for members: a step takes time in proportion
_MAX_WEIGHT = 20_000
# characters times nodes: a quarter of a second
_MAX_WORK = 100_000


@lru_cache(maxsize=2048)
def is_empty(node: Language, steps: int = 400) -> bool | None:
    """Whether no text is a member; None when `steps` derivatives, or fewer of a large language, did not settle it."""
    if node.nullable:
        return False
    if weight(node) > _MAX_WEIGHT:
        return None
    size = weight(node)
    if any(len(sample) * size < _MAX_WORK and matches(node, sample) for sample in _samples(node)):
        return False
    cost = 1 + size // 200
    seen, stack = {node}, [node]
    while stack:
        state = stack.pop()
        if isinstance(state, Words):
            if state.members:
                return False
            continue
        if isinstance(state, Chars):
            return False
        for point in first_points(state):
            steps -= cost
            if steps < 0:
                return None
            following = derive(state, point)
            if following.nullable:
                return False
            if following not in seen and following != EMPTY:
                seen.add(following)
                stack.append(following)
    return True


_PROBES = ("", "~", "zq~", "a" * 12)


@lru_cache(maxsize=8192)
def _samples(node: Language) -> tuple[str, ...]:
    """A few texts, members of `node` more often than not."""
    if isinstance(node, Chars):
        return chr(node.ranges[-1][0]), chr(node.ranges[0][0])
    if isinstance(node, Words):
        return tuple(sorted(node.members)[:4])
    if isinstance(node, Cat):
        columns = [_samples(part) for part in node.parts]
        if not all(columns):
            return ()
        return tuple("".join(column[min(pick, len(column) - 1)] for column in columns) for pick in range(2))
    if isinstance(node, Alt):
        return tuple(sample for part in node.parts[:8] for sample in _samples(part)[:2])
    if isinstance(node, And):
        return (*(sample for part in node.parts if not isinstance(part, Not) for sample in _samples(part)), *_PROBES)
    if isinstance(node, Repeat):
        times = max(node.low, 1)
        return tuple(sample * times for sample in _samples(node.part)) if times < 1000 else ()
    return _PROBES
