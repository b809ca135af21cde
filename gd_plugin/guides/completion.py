"""The shortest way to complete a text of a regular guide, and how long it can become.

In:  a Guide whose language is a grammar without recursion, a text so far.
Out: the fewest bytes that complete it, and a bound on them that holds for every text. None where a guide is not regular,
     or too large to be written out.
The characters of the guide are written out (Glushkov's construction); the shortest way from each of them to an end is
found once, from the ends back.
"""

import heapq

from gd_plugin.guides.automaton import Positions, bits_of
from gd_plugin.guides.caching import text_cache
from gd_plugin.guides.expression import num_positions
from gd_plugin.guides.grammar import to_regular
from gd_plugin.guides.guide import Guide
from gd_plugin.guides.language import TEXT_KINDS, language_of

__all__ = ["Completion", "completion_of"]

_MAX_POSITIONS = 2_000
_SURROGATES = range(0xD800, 0xE000)

Ranges = tuple[tuple[int, int], ...]


class Completion:
    """Shortest completions of one guide. Immutable but for a cache; safe to share between threads.

    Attributes:
        bound: bytes that complete any text that can be completed.
        needed: bytes that completions are made of.
    """

    def __init__(self, positions: Positions, nullable: bool, first: int, last: int) -> None:
        self._positions = positions
        self._first = first
        self._nullable = nullable
        self._cheapest = [_lowest(ranges, 0, 0x10FFFF) for ranges in positions.sets]
        self._size = [len(chr(code).encode()) if code is not None else 1 << 30 for code in self._cheapest]
        self._distance = self._distances(last)
        wide = any(ranges[-1][1] > 0x7F for ranges in positions.sets if ranges)
        # behind a part of a character at most three bytes are missing
        self.bound = max((d for d in self._distance if d < 1 << 30), default=0) + (3 if wide else 0)
        start = self.complete(b"")
        self.bound = max(self.bound, len(start or b""))
        self.needed = frozenset(b"".join(chr(code).encode() for code in self._cheapest if code is not None))
        if wide:
            self.needed |= frozenset(range(0x80, 0xC0))

    def complete(self, text: bytes) -> bytes | None:
        """Return the fewest bytes behind `text`, or None if nothing completes it."""
        whole, part = _split(text)
        state = self._state_after(whole)
        if state is None:
            return None
        if not part:
            if not whole and self._nullable:
                return b""
            return self._cheapest_way(state, at_start=not whole)
        low, high, missing = _codes_of(part)
        best: tuple[int, int, int] | None = None
        for position in bits_of(self._following(state, at_start=not whole)):
            code = _lowest(self._positions.sets[position], low, high)
            if code is not None and (best is None or self._distance[position] < best[0]):
                best = (self._distance[position], position, code)
        if best is None or best[0] >= 1 << 30:
            return None
        rest = self._cheapest_way(1 << best[1], at_start=False)
        return None if rest is None else chr(best[2]).encode()[-missing:] + rest

    def state(self, text: bytes) -> tuple[int | None, bytes]:
        """Return where `text` leads: texts of one state can be continued alike."""
        whole, part = _split(text)
        return self._state_after(whole), part

    def _following(self, state: int, *, at_start: bool) -> int:
        if at_start:
            return self._first
        reached = 0
        for position in bits_of(state):
            reached |= self._positions.follow[position]
        return reached

    def _state_after(self, text: str) -> int | None:
        """Return the characters of the guide that the last one of `text` can be; None if the guide does not allow it."""
        state = 0
        for place, character in enumerate(text):
            state = self._following(state, at_start=place == 0) & self._positions.members(ord(character))
            if not state:
                return None
        return state

    def _cheapest_way(self, state: int, *, at_start: bool) -> bytes | None:
        found: list[str] = []
        if at_start:
            left = 1 << 30
        else:
            left, position = min((self._distance[position], position) for position in bits_of(state))
            if left >= 1 << 30:
                return None
            state = 1 << position
        while left:
            options = bits_of(self._following(state, at_start=at_start))
            if not options:
                return None
            left, position = min((self._size[p] + self._distance[p], p) for p in options)
            code = self._cheapest[position]
            if code is None or left >= 1 << 30:
                return None
            found.append(chr(code))
            left = self._distance[position]
            state, at_start = 1 << position, False
        return "".join(found).encode()

    def _distances(self, last: int) -> list[int]:
        """Return the bytes from behind each character to an end."""
        count = len(self._positions.sets)
        before: list[list[int]] = [[] for _ in range(count)]
        for position in range(count):
            for following in bits_of(self._positions.follow[position]):
                before[following].append(position)
        distance = [1 << 30] * count
        pending = [(0, position) for position in bits_of(last)]
        for _, position in pending:
            distance[position] = 0
        heapq.heapify(pending)
        while pending:
            reached, position = heapq.heappop(pending)
            if reached > distance[position]:
                continue
            for earlier in before[position]:
                through = reached + self._size[position]
                if through < distance[earlier]:
                    distance[earlier] = through
                    heapq.heappush(pending, (through, earlier))
        return distance


@text_cache
def completion_of(guide: Guide) -> Completion | None:
    """Return the guide's completions, or None if it is not regular, too large, or stands behind free text."""
    if guide.guide_type not in TEXT_KINDS or guide.reasoning is not None:
        return None
    node = to_regular(language_of(guide).productive())
    if node is None or num_positions(node) > _MAX_POSITIONS:
        return None
    positions = Positions()
    nullable, first, last = positions.add(node)
    return None if positions.is_cut_off else Completion(positions, nullable, first, last)


def _split(text: bytes) -> tuple[str, bytes]:
    """Return the whole characters of `text`, and the bytes of a character that is not."""
    try:
        return text.decode(), b""
    except UnicodeDecodeError as error:
        return text[: error.start].decode(), text[error.start :]


def _codes_of(part: bytes) -> tuple[int, int, int]:
    """Return the lowest and highest code point whose UTF-8 begins with `part`, and how many bytes are missing."""
    lead = part[0]
    length = 2 if lead < 0xE0 else 3 if lead < 0xF0 else 4
    missing = max(length - len(part), 0)
    code = lead & (0x7F >> length)
    for byte in part[1:]:
        code = code << 6 | byte & 0x3F
    lowest = (0x80, 0x800, 0x10000)[length - 2]
    return max(code << 6 * missing, lowest), min((code + 1 << 6 * missing) - 1, 0x10FFFF), missing


def _lowest(ranges: Ranges, low: int, high: int) -> int | None:
    """Return the lowest character of `ranges` between `low` and `high`."""
    for start, end in ranges:
        code = max(start, low)
        if code in _SURROGATES:
            code = _SURROGATES.stop
        if code <= min(end, high):
            return code
    return None
