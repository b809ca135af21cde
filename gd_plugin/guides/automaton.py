"""How large is the automaton of an expression? Asked before an engine that builds all of it is started.

In:  a Node without references, and a limit.      Out: an estimate of the states over bytes, or None past the limit.
Bounded: the expression is written out to at most `limit` characters, states are counted up to the limit, and counting
ends after so many steps; what cannot be counted in that time is too large as well.
"""

from gd_plugin.guides.expression import CharSet, Either, Literal, Node, Repeat, Sequence, num_positions

__all__ = ["Positions", "bits_of", "estimate_states"]

_ASCII_END = 0x80
# states inside characters of several bytes, measured with outlines-core 0.2.14: "." has 8, "\w" 316 with 760 ranges
_MIN_WIDE_STATES = 8
_MAX_WIDE_STATES = 400

# code points whose characters are remembered
_MAX_MEMBERS = 4096
# about a second
_MAX_STEPS = 2_000_000

_Part = tuple[bool, int, int]  # matches empty, first characters, last characters: bit i is character i


def estimate_states(node: Node, limit: int) -> int | None:
    """Return about how many states a deterministic automaton over UTF-8 has, or None if more than `limit`."""
    if num_positions(node) > limit:
        return None
    characters = Positions()
    first = characters.add(node)[1]
    classes = characters.classes()
    start = 1 << len(characters.sets)
    follow = [*characters.follow, first]
    seen = {start}
    pending = [start]
    total = 1
    steps = characters.steps
    # a step over n characters works on numbers of n bits
    weight = 1 + len(follow) // 512
    while pending:
        members = bits_of(pending.pop())
        steps += (len(members) + len(classes)) * weight
        if steps > _MAX_STEPS:
            return None
        reached = 0
        for character in members:
            reached |= follow[character]
        for inputs, width in classes:
            target = reached & inputs
            if target:
                total += width
                if target not in seen:
                    seen.add(target)
                    pending.append(target)
                    total += 1
            if total > limit:
                return None
    return total


def bits_of(state: int) -> list[int]:
    """Return the numbers of the bits that are set."""
    found = []
    while state:
        low = state & -state
        found.append(low.bit_length() - 1)
        state ^= low
    return found


class Positions:
    """The characters of an expression written out, and which may follow which (Glushkov's construction).

    Attributes:
        sets: code points that each character may be.
        follow: characters that may come behind each one, as bits.
        steps: work so far; past a limit connections are missing.
    """

    def __init__(self) -> None:
        self.sets: list[tuple[tuple[int, int], ...]] = []
        self.follow: list[int] = []
        self._members: dict[int, int] = {}
        self.steps = 0

    @property
    def is_cut_off(self) -> bool:
        """Tell whether connections are missing."""
        return self.steps > _MAX_STEPS

    def members(self, code: int) -> int:
        """Return the characters that can be `code`, as bits."""
        found = self._members.get(code)
        if found is None:
            found = sum(1 << i for i, ranges in enumerate(self.sets) if any(a <= code <= b for a, b in ranges))
            if len(self._members) < _MAX_MEMBERS:
                self._members[code] = found
        return found

    def add(self, node: Node) -> _Part:
        """Write out `node`; return whether it matches the empty text, its first and its last characters."""
        if isinstance(node, Literal):
            return self._join([self._one(((ord(character), ord(character)),)) for character in node.text])
        if isinstance(node, CharSet):
            return self._one(node.ranges)
        if isinstance(node, Sequence):
            return self._join([self.add(part) for part in node.parts])
        if isinstance(node, Either):
            parts = [self.add(option) for option in node.options]
            nullable, first, last = False, 0, 0
            for part in parts:
                nullable, first, last = nullable or part[0], first | part[1], last | part[2]
            return nullable, first, last
        if isinstance(node, Repeat):
            copies = [self.add(node.item) for _ in range(node.high if node.high is not None else max(node.low, 1))]
            if node.high is None and copies:
                self._connect(copies[-1][2], copies[-1][1])
            return self._join([(copy[0] or i >= node.low, *copy[1:]) for i, copy in enumerate(copies)])
        raise TypeError("an expression with references has no automaton of its own")

    def _one(self, ranges: tuple[tuple[int, int], ...]) -> _Part:
        self.sets.append(ranges)
        self.follow.append(0)
        bit = 1 << (len(self.sets) - 1)
        return False, bit, bit

    def _join(self, parts: list[_Part]) -> _Part:
        nullable, first, last = True, 0, 0
        for part in parts:
            self._connect(last, part[1])
            first |= part[1] if nullable else 0
            last = part[2] | (last if part[0] else 0)
            nullable = nullable and part[0]
        return nullable, first, last

    def _connect(self, before: int, after: int) -> None:
        if not before or not after or self.steps > _MAX_STEPS:
            return
        self.steps += before.bit_count() * (1 + len(self.sets) // 512)
        for character in bits_of(before):
            self.follow[character] |= after

    def classes(self) -> list[tuple[int, int]]:
        """Return sets of characters that one input can take at once, with the states inside that input."""
        bounds = sorted({edge for ranges in set(self.sets) for low, high in ranges for edge in (low, high + 1)})
        places = {edge: i for i, edge in enumerate(bounds)}
        members = [0] * len(bounds)
        by_set: dict[tuple[tuple[int, int], ...], int] = {}
        for character, ranges in enumerate(self.sets):
            by_set[ranges] = by_set.get(ranges, 0) | 1 << character
        for ranges, bits in by_set.items():
            for low, high in ranges:
                for place in range(places[low], places[high + 1]):
                    members[place] |= bits
        wide: dict[int, int] = {}
        for edge, bits in zip(bounds, members, strict=True):
            if bits:
                wide[bits] = wide.get(bits, 0) + (edge >= _ASCII_END)
        return [
            (bits, min(_MIN_WIDE_STATES + pieces // 2, _MAX_WIDE_STATES) if pieces else 0)
            for bits, pieces in wide.items()
        ]
