"""Numbers: ranges, multiples and fixed values -> the language of their JSON spellings.

In:  bounds and steps as exact fractions, read from the schema's decimal text.
Out: `Numbers`, which can be intersected, tested and written as a language over the characters of JSON numbers.
Spellings: every plain spelling (`10`, `10.0`, `10.00`), and scientific ones. Without bounds those are all of JSON's; inside
bounds they have one digit before the point and an exponent of at most 99 (`1e1`, `5.25E-07`, as programs print them).
Where a bound is exclusive at most 15 digits are significant, so that no reader's binary rounding lands on the bound.
"""

from dataclasses import dataclass, replace
from fractions import Fraction
from functools import lru_cache
from math import lcm

from gd_plugin.guides.schema.languages import (
    EMPTY,
    EPSILON,
    Language,
    alt,
    both,
    cat,
    chars,
    negate,
    repeat,
    text,
    words,
)

__all__ = ["ANY_NUMBER", "Numbers", "TooComplexError", "read_number"]

_DIGIT = chars([(48, 57)])
_NONZERO = chars([(49, 57)])
_DIGITS = repeat(_DIGIT, 0, None)
_ZEROS = repeat(text("0"), 0, None)
_SIGN = alt(EPSILON, text("-"))
_E = words("eE")
_FRACTION = alt(EPSILON, cat(text("."), repeat(_DIGIT, 1, None)))
_NO_FRACTION = alt(EPSILON, cat(text("."), repeat(text("0"), 1, None)))
_INTEGER = alt(text("0"), cat(_NONZERO, _DIGITS))
_MAX_EXPONENT = 99
_SAFE_DIGITS = 15
# digits of a bound and values listed one by one, before a schema counts as too complex
_MAX_BOUND_DIGITS = 400
_MAX_VALUES = 1000
_MAX_RESIDUES = 13


class TooComplexError(Exception):
    """No language of reasonable size says it."""


def read_number(value: int | float) -> Fraction:
    """The number a schema's author wrote: floats by their shortest decimal text, not by their binary value."""
    return Fraction(value) if isinstance(value, int) else Fraction(repr(value))


@dataclass(frozen=True, slots=True)
class Numbers:
    """A set of numbers.

    Attributes:
        integer: True for integers only, False for the others only, None for both.
        low, high: bounds, None where there is none; `low_open` and `high_open` exclude them.
        multiple: every member is a multiple of it.
        values: the members are among these, if not None.
        excluded: numbers left out.
        not_multiples: no member is a multiple of any of these.
    """

    integer: bool | None = None
    low: Fraction | None = None
    low_open: bool = False
    high: Fraction | None = None
    high_open: bool = False
    multiple: Fraction | None = None
    values: frozenset[Fraction] | None = None
    excluded: frozenset[Fraction] = frozenset()
    not_multiples: tuple[Fraction, ...] = ()

    def at_least(self, bound: Fraction, is_open: bool) -> "Numbers":
        """The members from `bound` on."""
        if self.low is not None and (self.low, self.low_open) >= (bound, is_open):
            return self
        return replace(self, low=bound, low_open=is_open)

    def at_most(self, bound: Fraction, is_open: bool) -> "Numbers":
        """The members up to `bound`."""
        if self.high is not None and (self.high, not self.high_open) <= (bound, not is_open):
            return self
        return replace(self, high=bound, high_open=is_open)

    def of_kind(self, integer: bool) -> "Numbers":
        """The members that are integers, or those that are not."""
        if self.integer is not None and self.integer != integer:
            return replace(self, values=frozenset())
        return replace(self, integer=integer)

    def multiples_of(self, step: Fraction) -> "Numbers":
        """The members that are multiples of `step`."""
        if self.multiple is None:
            return replace(self, multiple=step)
        a, b = self.multiple, step
        common = Fraction(lcm(a.numerator * b.denominator, b.numerator * a.denominator), a.denominator * b.denominator)
        return replace(self, multiple=common)

    def among(self, values: frozenset[Fraction]) -> "Numbers":
        """The members that are among `values`."""
        return replace(self, values=values if self.values is None else self.values & values)

    def without(self, values: frozenset[Fraction]) -> "Numbers":
        """The members that are not among `values`."""
        return replace(self, excluded=self.excluded | values)

    def contains(self, value: Fraction) -> bool:
        """Whether `value` is a member."""
        if self.integer is not None and (value.denominator == 1) != self.integer:
            return False
        if self.low is not None and (value < self.low or (self.low_open and value == self.low)):
            return False
        if self.high is not None and (value > self.high or (self.high_open and value == self.high)):
            return False
        if self.multiple is not None and value % self.multiple:
            return False
        if any(value % step == 0 for step in self.not_multiples) or value in self.excluded:
            return False
        return self.values is None or value in self.values

    def settled(self) -> "Numbers":
        """The same set, listed where it is small."""
        if self.values is not None:
            return Numbers(values=frozenset(value for value in self.values if self.contains(value)))
        if self.low is not None and self.high is not None:
            if self.low > self.high or (self.low == self.high and (self.low_open or self.high_open)):
                return Numbers(values=frozenset())
            if self.low == self.high:
                return Numbers(values=frozenset({self.low} if self.contains(self.low) else ()))
            step = self.multiple
            if self.integer:
                step = Fraction(1) if step is None else Numbers(multiple=step).multiples_of(Fraction(1)).multiple
            if step is not None:
                first = -(-self.low // step)
                last = self.high // step
                if last - first < (_MAX_VALUES if step != 1 else 3 if not self.excluded else 100):
                    found = [step * count for count in range(int(first), int(last) + 1)]
                    return Numbers(values=frozenset(value for value in found if self.contains(value)))
        return self

    def is_empty(self) -> bool:
        """Whether there is provably no member."""
        return self.settled().values == frozenset()

    def language(self) -> Language:
        """The JSON spellings of the members; see the module for which.

        Raises:
            TooComplexError: no language of reasonable size says it.
        """
        numbers = self.settled()
        if numbers.values is not None:
            return alt(*(_spelling(value) for value in sorted(numbers.values)))
        return _language(numbers)


ANY_NUMBER = Numbers()


@lru_cache(maxsize=512)
def _language(numbers: Numbers) -> Language:
    if numbers.integer and numbers.multiple is not None:
        step = numbers.multiples_of(Fraction(1)).multiple
        numbers = replace(numbers, multiple=None if step == 1 else step)
    plain = numbers == replace(ANY_NUMBER, integer=numbers.integer)
    if plain and numbers.integer is None:
        exponent = alt(EPSILON, cat(_E, alt(EPSILON, chars([(43, 43), (45, 45)])), repeat(_DIGIT, 1, None)))
        return cat(_SIGN, _INTEGER, _FRACTION, exponent)
    if plain and numbers.integer:
        return alt(cat(_SIGN, _INTEGER), _spelled_integers())
    parts = [_range_language(numbers)]
    if numbers.integer is False:
        parts.append(cat(_SIGN, _INTEGER, text("."), _DIGITS, _NONZERO, _DIGITS))
    if numbers.multiple is not None:
        parts.append(_multiples(numbers.multiple))
    if numbers.integer and numbers.multiple is None:
        whole = both(_range_language(numbers, whole=True), cat(_SIGN, _INTEGER))
        spelled = both(_spelled_integers(), *parts)
        parts = [alt(whole, spelled)]
    for step in numbers.not_multiples:
        parts.append(negate(_multiples(step)))
        parts.append(cat(_SIGN, _INTEGER, _FRACTION))
    for value in sorted(numbers.excluded):
        parts.append(negate(_spelling(value)))
    return both(*parts)


@lru_cache(maxsize=1)
def _spelled_integers() -> Language:
    """Integers written with a point or an exponent, no larger than binary readers keep exact."""
    mantissa = cat(_NONZERO, repeat(_DIGIT, 0, _SAFE_DIGITS - 1))
    plus = alt(EPSILON, text("+"))
    forms = [
        cat(alt(text("0"), mantissa), text("."), repeat(text("0"), 1, None)),
        cat(alt(text("0"), mantissa), _NO_FRACTION, _E, plus, repeat(_DIGIT, 1, 2)),
    ]
    for count in range(1, _SAFE_DIGITS):
        digits = repeat(_DIGIT, 1, count)
        forms.append(cat(_NONZERO, text("."), digits, _ZEROS, _E, plus, _ZEROS, text(str(count))))
    return cat(_SIGN, alt(*forms))


def _range_language(numbers: Numbers, whole: bool = False) -> Language:
    """Spellings inside the bounds; `whole` leaves out points and exponents."""
    low, high = numbers.low, numbers.high
    exact = numbers.excluded or numbers.not_multiples or numbers.integer is False
    parts = []
    if high is None or high >= 0:
        bottom = (
            (low, numbers.low_open) if low is not None and low > 0 else (Fraction(0), low == 0 and numbers.low_open)
        )
        parts.append(_magnitudes(*bottom, high, numbers.high_open, whole, bool(exact)))
    if low is None or low <= 0:
        bottom = (
            (-high, numbers.high_open)
            if high is not None and high < 0
            else (Fraction(0), high == 0 and numbers.high_open)
        )
        top = None if low is None else -low
        parts.append(cat(text("-"), _magnitudes(*bottom, top, numbers.low_open, whole, bool(exact))))
    return alt(*parts)


def _magnitudes(
    low: Fraction, low_open: bool, high: Fraction | None, high_open: bool, whole: bool, exact: bool
) -> Language:
    """Unsigned spellings between `low` >= 0 and `high`."""
    if high is not None and (low > high or (low == high and (low_open or high_open))):
        return EMPTY
    plain = _plain_at_least(low, low_open)
    if high is not None:
        plain = both(plain, _plain_at_most(high, high_open))
    if whole:
        return plain
    if low_open or high_open:
        plain = both(plain, _safe_decimals())
    if low == 0 and not low_open and high is None and not exact:
        exponent = cat(_E, alt(EPSILON, chars([(43, 43), (45, 45)])), repeat(_DIGIT, 1, None))
        return cat(_INTEGER, _FRACTION, alt(EPSILON, exponent))
    return alt(plain, _scientific(low, low_open, high, high_open))


@lru_cache(maxsize=1)
def _safe_decimals() -> Language:
    """Unsigned plain decimals of at most 15 significant digits."""
    forms = [cat(text("0"), alt(EPSILON, cat(text("."), repeat(text("0"), 0, 99), repeat(_DIGIT, 1, _SAFE_DIGITS))))]
    for count in range(1, _SAFE_DIGITS + 1):
        whole = cat(_NONZERO, repeat(_DIGIT, count - 1, count - 1))
        rest = _SAFE_DIGITS - count
        forms.append(cat(whole, alt(EPSILON, cat(text("."), repeat(_DIGIT, 1, rest))) if rest else EPSILON))
    return alt(*forms)


def _decimal(value: Fraction) -> tuple[str, str]:
    """Digits before and behind the point of a value that has finitely many; none behind it for an integer."""
    scale = 0
    while (value * 10**scale).denominator != 1:
        scale += 1
        if scale > _MAX_BOUND_DIGITS:
            raise TooComplexError(f"a bound with over {_MAX_BOUND_DIGITS} digits")
    if value >= 10**_MAX_BOUND_DIGITS:
        raise TooComplexError(f"a bound with over {_MAX_BOUND_DIGITS} digits")
    digits = str(int(value * 10**scale)).rjust(scale + 1, "0")
    return (digits[:-scale], digits[-scale:].rstrip("0")) if scale else (digits, "")


def _between(low: int, high: int) -> Language:
    return chars([(48 + low, 48 + high)]) if low <= high else EMPTY


def _whole_at_least(value: int) -> Language:
    digits = str(value)
    parts = [cat(_NONZERO, repeat(_DIGIT, len(digits), None))]
    for index, digit in enumerate(digits):
        rest = len(digits) - index - 1
        parts.append(cat(text(digits[:index]), _between(int(digit) + 1, 9), repeat(_DIGIT, rest, rest)))
    return alt(*parts, text(digits)) if value else _INTEGER


def _whole_at_most(value: int) -> Language:
    if value < 0:
        return EMPTY
    digits = str(value)
    parts = [text("0"), text(digits)]
    if len(digits) > 1:
        parts.append(cat(_NONZERO, repeat(_DIGIT, 0, len(digits) - 2)))
    for index, digit in enumerate(digits):
        rest = len(digits) - index - 1
        first = _between(0 if index else 1, int(digit) - 1)
        parts.append(cat(text(digits[:index]), first, repeat(_DIGIT, rest, rest)))
    return alt(*parts)


def _plain_at_least(value: Fraction, is_open: bool) -> Language:
    whole, fraction = _decimal(value)
    beyond = cat(_DIGITS, _NONZERO, _DIGITS) if is_open else _DIGITS
    if not fraction:
        exact = cat(text("."), beyond) if is_open else _FRACTION
    else:
        parts: list[Language] = [cat(text("." + fraction), beyond)]
        for index, digit in enumerate(fraction):
            parts.append(cat(text("." + fraction[:index]), _between(int(digit) + 1, 9), _DIGITS))
        exact = alt(*parts)
    return alt(cat(_whole_at_least(int(whole) + 1), _FRACTION), cat(text(whole), exact))


def _plain_at_most(value: Fraction, is_open: bool) -> Language:
    whole, fraction = _decimal(value)
    if not fraction:
        exact = EMPTY if is_open else _NO_FRACTION
    else:
        parts: list[Language] = [EPSILON]
        if not is_open:
            parts.append(cat(text("." + fraction), _ZEROS))
        for index, digit in enumerate(fraction):
            if index:
                parts.append(text("." + fraction[:index]))
            parts.append(cat(text("." + fraction[:index]), _between(0, int(digit) - 1), _DIGITS))
        exact = alt(*parts)
    return alt(cat(_whole_at_most(int(whole) - 1), _FRACTION), cat(text(whole), exact))


def _exponents(values: list[int]) -> Language:
    """Spellings of exponents, with optional sign and leading zeros."""
    parts = []
    positive = [str(value) for value in values if value > 0]
    negative = [str(-value) for value in values if value < 0]
    if positive:
        parts.append(cat(alt(EPSILON, text("+")), _ZEROS, words(positive)))
    if negative:
        parts.append(cat(text("-"), _ZEROS, words(negative)))
    if 0 in values:
        parts.append(cat(alt(EPSILON, chars([(43, 43), (45, 45)])), repeat(text("0"), 1, None)))
    return alt(*parts)


def _scientific(low: Fraction, low_open: bool, high: Fraction | None, high_open: bool) -> Language:
    """Unsigned spellings with one digit before the point and an exponent, between `low` and `high`."""
    fraction = alt(EPSILON, cat(text("."), repeat(_DIGIT, 1, _SAFE_DIGITS - 1 if low_open or high_open else None)))
    inside, parts = [], []
    for exponent in range(-_MAX_EXPONENT, _MAX_EXPONENT + 1):
        unit = Fraction(10) ** exponent
        above = low < unit or (low == unit and not low_open)
        below = high is None or high >= unit * 10
        if above and below:
            inside.append(exponent)
        elif low < unit * 10 and (high is None or high >= unit):
            mantissa = [cat(_NONZERO, fraction)]
            if not above:
                mantissa.append(_plain_at_least(low / unit, low_open))
            if not below and high is not None:
                mantissa.append(_plain_at_most(high / unit, high_open))
            parts.append(cat(both(*mantissa), _E, _exponents([exponent])))
    if inside:
        parts.append(cat(_NONZERO, fraction, _E, _exponents(inside)))
    if low == 0 and not low_open:
        sign = alt(EPSILON, chars([(43, 43), (45, 45)]))
        parts.append(cat(text("0"), _NO_FRACTION, _E, sign, repeat(_DIGIT, 1, 2)))
    return alt(*parts)


@lru_cache(maxsize=4096)
def _spelling(value: Fraction) -> Language:
    """All plain and normalised scientific spellings of one number."""
    if value == 0:
        sign = alt(EPSILON, chars([(43, 43), (45, 45)]))
        return cat(_SIGN, text("0"), _NO_FRACTION, alt(EPSILON, cat(_E, sign, repeat(_DIGIT, 1, 2))))
    whole, fraction = _decimal(abs(value))
    plain = cat(text(f"{whole}.{fraction}"), _ZEROS) if fraction else cat(text(whole), _NO_FRACTION)
    digits = (whole + fraction).lstrip("0").rstrip("0")
    exponent = len(whole) - 1 if whole != "0" else -(len(fraction) - len(fraction.lstrip("0")) + 1)
    parts = [plain]
    if abs(exponent) <= _MAX_EXPONENT:
        mantissa = cat(text(f"{digits[0]}.{digits[1:]}"), _ZEROS) if digits[1:] else cat(text(digits), _NO_FRACTION)
        parts.append(cat(mantissa, _E, _exponents([exponent])))
    return cat(text("-") if value < 0 else EPSILON, alt(*parts))


@lru_cache(maxsize=256)
def _multiples(step: Fraction) -> Language:
    """Plain spellings of the multiples of `step` = a / b: the integer part runs through residues modulo a."""
    a, b = step.numerator, step.denominator
    if b > _MAX_VALUES:
        raise TooComplexError(f"multiples of {float(step)}")
    parts = []
    for count in range(b):
        whole, rest = divmod(count * step, 1)
        _, fraction = _decimal(rest)
        behind = cat(text("." + fraction), _ZEROS) if fraction else _NO_FRACTION
        parts.append(cat(_residues(int(whole) % a, a), behind))
    return cat(_SIGN, alt(*parts))


def _residues(residue: int, modulus: int) -> Language:
    """Unsigned integers that leave `residue` modulo `modulus`."""
    tail, rest, length = 1, modulus, 0
    while rest % 2 == 0 or rest % 5 == 0:
        factor = 10 if rest % 10 == 0 else 2 if rest % 2 == 0 else 5
        rest //= factor
        tail *= factor
    while 10**length % tail:
        length += 1
    if rest > _MAX_RESIDUES or 10**length > 100 * _MAX_VALUES:
        raise TooComplexError(f"multiples of {modulus}")
    parts: list[Language] = [_INTEGER]
    if tail > 1:
        endings = [str(value).rjust(length, "0") for value in range(residue % tail, 10**length, tail)]
        short = [str(value) for value in range(residue % tail, 10**length, tail)]
        parts.append(alt(words(short), cat(_NONZERO, _DIGITS, words(endings))))
    if rest > 1:
        parts.append(_residues_by_elimination(residue % rest, rest))
    return both(*parts)


@lru_cache(maxsize=64)
def _residues_by_elimination(residue: int, modulus: int) -> Language:
    """Digit strings by a remainder automaton, its states eliminated one by one."""
    start, end = modulus, modulus + 1
    edges: dict[tuple[int, int], Language] = {(start, 0): EPSILON, (residue, end): EPSILON}
    for state in range(modulus):
        for digit in range(10):
            key = (state, (state * 10 + digit) % modulus)
            edges[key] = alt(edges.get(key, EMPTY), text(str(digit)))
    for state in range(modulus):
        loop = repeat(edges.pop((state, state), EMPTY), 0, None)
        into = [(source, edge) for (source, target), edge in edges.items() if target == state]
        out = [(target, edge) for (source, target), edge in edges.items() if source == state]
        edges = {key: edge for key, edge in edges.items() if state not in key}
        for source, before in into:
            for target, behind in out:
                key = (source, target)
                edges[key] = alt(edges.get(key, EMPTY), cat(before, loop, behind))
    return edges.get((start, end), EMPTY)
