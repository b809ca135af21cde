"""Numbers: ranges, multiples and fixed values -> the language of their JSON spellings.

In:  bounds and steps as exact fractions, read from the schema's decimal text.
Out: `Numbers`, which can be intersected, tested and written as a language over the characters of JSON numbers.
Spellings: every plain spelling (`10`, `10.0`, `10.00`), and scientific ones. Without bounds those are all of JSON's; inside
bounds they have one digit before the point and an exponent of at most 99 (`1e1`, `5.25E-07`, as programs print them).
No reader's binary rounding carries a number over a bound. Beside excluded values and multiples at most 15 digits are
significant where there is a point or an exponent, for the same reason.
"""

import sys
from collections.abc import Iterable
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import lru_cache
from math import ceil, floor, inf, lcm, nextafter

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
_ZERO_FRACTION = cat(text("."), repeat(text("0"), 1, None))
_NO_FRACTION = alt(EPSILON, _ZERO_FRACTION)
_ANY_SIGN = alt(EPSILON, words("+-"))
_INTEGER = alt(text("0"), cat(_NONZERO, _DIGITS))
_WHOLE = cat(_SIGN, _INTEGER)
_MAX_EXPONENT = 99
_SAFE_DIGITS = 15
# integers up to it have a binary float of their own
_EXACT_INTEGERS = 1 << 53
_ZERO = Fraction(0)
# digits of a bound and values listed one by one, before a schema counts as too complex
_MAX_BOUND_DIGITS = 400
_MAX_VALUES = 1000
_MAX_RESIDUES = 11
# values in a row from which they are a range
_LONG_RUN = 10


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
        digits_only: members are spelled without a point and an exponent.
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
    digits_only: bool = False

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
            return self._listing(value for value in self.values if self.contains(value))
        if self.low is not None and self.high is not None:
            if self.low > self.high or (self.low == self.high and (self.low_open or self.high_open)):
                return self._listing(())
            if self.low == self.high:
                return self._listing({self.low} if self.contains(self.low) else ())
            step = self.multiple
            if self.integer:
                step = Fraction(1) if step is None else Numbers(multiple=step).multiples_of(Fraction(1)).multiple
            if step is not None:
                first = -(-self.low // step)
                last = self.high // step
                if last - first < (_MAX_VALUES if step != 1 else 3 if not self.excluded else 100):
                    found = [step * count for count in range(int(first), int(last) + 1)]
                    return self._listing(value for value in found if self.contains(value))
        return self

    def _listing(self, values: Iterable[Fraction]) -> "Numbers":
        return Numbers(values=frozenset(values), digits_only=self.digits_only)

    def few(self, most: int) -> list[Fraction] | None:
        """The members, if they are integers or multiples and at most `most`; in order."""
        numbers = self.settled()
        if numbers.values is None and numbers.integer and numbers.low is not None and numbers.high is not None:
            first, last = ceil(numbers.low), floor(numbers.high)
            if last - first < 2 * most:
                found = (Fraction(value) for value in range(first, last + 1))
                numbers = self._listing(value for value in found if self.contains(value))
        return None if numbers.values is None or len(numbers.values) > most else sorted(numbers.values)

    def is_empty(self) -> bool:
        """Whether there is provably no member."""
        return self.settled().values == frozenset()

    def language(self) -> Language:
        """The JSON spellings of the members; see the module for which.

        Raises:
            TooComplexError: no language of reasonable size says it.
        """
        numbers = self.settled()
        if numbers.digits_only and numbers.values is None and not numbers.multiple and not numbers.not_multiples:
            return _digits_only(numbers)
        found = _language(numbers) if numbers.values is None else _listed(sorted(numbers.values))
        return both(found, _WHOLE) if numbers.digits_only else found


ANY_NUMBER = Numbers()


def _digits_only(numbers: Numbers) -> Language:
    """The integers inside the bounds, in digits."""
    low, high = _integer_bounds(numbers)
    parts = []
    if high is None or high >= 0:
        parts.append(_whole_between(max(low or 0, 0), high))
    if low is None or low <= 0:
        parts.append(cat(text("-"), _whole_between(max(-(high or 0), 0), None if low is None else -low)))
    outside = [str(value) for value in numbers.excluded] + ["-0"] * (0 in numbers.excluded)
    return both(alt(*parts), negate(words(outside)))


@lru_cache(maxsize=512)
def _language(numbers: Numbers) -> Language:
    if numbers.integer and numbers.multiple is not None:
        step = numbers.multiples_of(Fraction(1)).multiple
        numbers = replace(numbers, multiple=None if step == 1 else step)
    plain = numbers == replace(ANY_NUMBER, integer=numbers.integer)
    if plain and numbers.integer is None:
        exponent = alt(EPSILON, cat(_E, _ANY_SIGN, repeat(_DIGIT, 1, None)))
        return cat(_SIGN, _INTEGER, _FRACTION, exponent)
    if plain and numbers.integer:
        return alt(cat(_SIGN, _INTEGER), _spelled_integers())
    parts = [_integer_range(numbers) if numbers.integer and numbers.multiple is None else _range_language(numbers)]
    if numbers.integer is False:
        parts.append(cat(_SIGN, _INTEGER, text("."), _DIGITS, _NONZERO, _DIGITS))
    if numbers.multiple is not None:
        parts.append(_multiples(numbers.multiple))
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


def _integer_range(numbers: Numbers) -> Language:
    """Spellings of the integers inside the bounds."""
    low, high = _integer_bounds(numbers)
    parts = []
    if high is None or high >= 0:
        parts.append(_integer_magnitudes(max(low or 0, 0), high))
    if low is None or low <= 0:
        top = None if low is None else -low
        parts.append(cat(text("-"), _integer_magnitudes(max(-(high or 0), 0), top)))
    return alt(*parts)


def _integer_bounds(numbers: Numbers) -> tuple[int | None, int | None]:
    low = None if numbers.low is None else floor(numbers.low) + 1 if numbers.low_open else ceil(numbers.low)
    high = None if numbers.high is None else ceil(numbers.high) - 1 if numbers.high_open else floor(numbers.high)
    if any(bound is not None and abs(bound) >= 10**_MAX_BOUND_DIGITS for bound in (low, high)):
        raise TooComplexError(f"a bound with over {_MAX_BOUND_DIGITS} digits")
    return low, high


def _integer_magnitudes(low: int, high: int | None) -> Language:
    """Unsigned spellings of the integers between `low` >= 0 and `high`.

    Points and exponents are there only where readers that use binary floats keep the value.
    """
    whole = _whole_between(low, high)
    largest = 10**_SAFE_DIGITS - 1
    short = whole if high is not None and high <= largest else _whole_between(low, largest)
    parts = [whole, cat(short, _ZERO_FRACTION)]
    full: list[int] = []
    low = int(_inner(Fraction(low), False, up=True))
    high = None if high is None else int(_inner(Fraction(high), False, up=False))
    for exponent in range(_MAX_EXPONENT + 1):
        first, last = max(low, 10**exponent), 10 ** (exponent + 1) - 1
        last = last if high is None else min(high, last)
        if first > last:
            continue
        if first == 10**exponent and last == 10 ** (exponent + 1) - 1:
            full.append(exponent)
        else:
            parts.append(cat(_mantissas(first, last, exponent), _E, _exponents((exponent,))))
    for exponent in full:
        if 0 < exponent < _SAFE_DIGITS:
            digits = cat(text("."), repeat(_DIGIT, 1, exponent), _ZEROS)
            parts.append(cat(_NONZERO, digits, _E, _exponents((exponent,))))
    if full:
        parts.append(cat(_NONZERO, _NO_FRACTION, _E, _exponents(tuple(full))))
    if low == 0:
        parts.append(cat(text("0"), _NO_FRACTION, _E, _ANY_SIGN, repeat(_DIGIT, 1, 2)))
    return alt(*parts)


def _mantissas(low: int, high: int, exponent: int) -> Language:
    """`d.ddd` times ten to the `exponent`, for integers of that many digits and one, between `low` and `high`."""
    unit = 10**exponent
    if exponent >= _SAFE_DIGITS:
        return cat(_between(-(-low // unit), high // unit), _NO_FRACTION)
    parts = []
    for digits, first, last in _by_first_digit(str(low), str(high)):
        fraction = cat(text("."), _fraction_between(first, last))
        parts.append(cat(digits, fraction if first.strip("0") else alt(EPSILON, fraction, _ZERO_FRACTION)))
    return alt(*parts)


def _fraction_between(low: str, high: str) -> Language:
    """Digits between two texts of equally many, not none; zeros at the end may be left out, or more be written."""
    if not low.strip("0") and not high.strip("9"):
        return cat(repeat(_DIGIT, 1, len(low)), _ZEROS) if low else repeat(text("0"), 1, None)
    parts = []
    for digits, first, last in _by_first_digit(low, high):
        rest = _fraction_between(first, last)
        parts.append(cat(digits, rest if first.strip("0") else alt(EPSILON, rest)))
    return alt(*parts)


def _range_language(numbers: Numbers) -> Language:
    """Spellings inside the bounds."""
    tight = bool(numbers.excluded or numbers.not_multiples or numbers.multiple or numbers.integer is False)
    low = None if numbers.low is None else _inner(numbers.low, numbers.low_open, up=True)
    high = None if numbers.high is None else _inner(numbers.high, numbers.high_open, up=False)
    over, under = low == 0 and numbers.low_open, high == 0 and numbers.high_open
    parts = []
    if any(bound is not None and abs(bound) > _EXACT_INTEGERS for bound in (numbers.low, numbers.high)):
        parts.append(both(_integer_range(numbers), cat(_SIGN, _INTEGER)))
    if high is None or high >= 0:
        bottom = (low, False) if low is not None and low > 0 else (_ZERO, over)
        parts.append(_magnitudes(*bottom, high, under, tight))
    if low is None or low <= 0:
        bottom = (-high, False) if high is not None and high < 0 else (_ZERO, under)
        parts.append(cat(text("-"), _magnitudes(*bottom, None if low is None else -low, over, tight)))
    return alt(*parts)


def _inner(bound: Fraction, is_open: bool, up: bool) -> Fraction:
    """The outermost number inside a bound that is the usual spelling of a binary float.

    Rounding keeps order, so what a program reads from a spelling inside that number is inside the bound. An open bound
    of 0 stays as it is.
    """
    if bound == 0 or not (is_open or (bound.denominator == 1 and abs(bound) > _EXACT_INTEGERS)):
        return bound
    try:
        near = float(bound)
    except OverflowError:
        return bound if up == (bound > 0) else Fraction(sys.float_info.max) * (1 if bound > 0 else -1)
    # an integer is compared exactly, a fraction by the float it is read as
    rounded = Fraction(near) if bound.denominator == 1 else bound
    if (rounded == bound and is_open) or (rounded < bound if up else rounded > bound):
        near = nextafter(near, inf if up else -inf)
    return Fraction(near) if near.is_integer() else Fraction(repr(near))


def _magnitudes(low: Fraction, over: bool, high: Fraction | None, under: bool, tight: bool) -> Language:
    """Unsigned spellings between `low` >= 0 and `high`.

    Args:
        low: least number.
        over: `low` is 0 and left out.
        high: greatest number, if there is one.
        under: `high` is 0 and left out.
        tight: at most 15 digits are significant beside a point or an exponent.
    """
    if high is not None and (low > high or (low == high and (over or under))):
        return EMPTY
    plain = _plain_over_zero() if over else _plain_at_least(low)
    if high is not None:
        plain = both(plain, _plain_at_most(high))
    if tight:
        plain = both(plain, alt(_INTEGER, _safe_decimals()))
    elif low == 0 and high is None and not over:
        return cat(_INTEGER, _FRACTION, alt(EPSILON, cat(_E, _ANY_SIGN, repeat(_DIGIT, 1, None))))
    return alt(plain, _scientific(low, over, high, tight))


def _listed(values: list[Fraction]) -> Language:
    """Spellings of fixed values; runs of integers as ranges."""
    parts: list[Language] = []
    start = 0
    for place, value in enumerate(values, 1):
        if place < len(values) and value.denominator == 1 and values[place] == value + 1:
            continue
        if place - start > _LONG_RUN:
            parts.append(_integer_range(Numbers(low=values[start], high=value)))
        else:
            parts.extend(map(_spelling, values[start:place]))
        start = place
    return alt(*parts)


@lru_cache(maxsize=1)
def _plain_over_zero() -> Language:
    """Unsigned plain decimals over 0, and over what binary floats round to it."""
    small = cat(text("0."), repeat(text("0"), 0, _MAX_EXPONENT), _NONZERO, _DIGITS)
    return alt(cat(_whole_at_least(1), _FRACTION), small)


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


def _whole_between(low: int, high: int | None) -> Language:
    """Digits of the integers from `low` to `high`."""
    if high is None:
        return _whole_at_least(low)
    if low > high:
        return EMPTY
    parts: list[Language] = []
    for length in range(len(str(low)), len(str(high)) + 1):
        first = max(low, 10 ** (length - 1) if length > 1 else 0)
        parts.append(_same_length(str(first), str(min(high, 10**length - 1))))
    return alt(*parts)


def _same_length(low: str, high: str) -> Language:
    """Digits between two texts of equally many digits."""
    if not low.strip("0") and not high.strip("9"):
        return repeat(_DIGIT, len(low), len(low))
    return alt(*(cat(digits, _same_length(first, last)) for digits, first, last in _by_first_digit(low, high)))


def _by_first_digit(low: str, high: str) -> list[tuple[Language, str, str]]:
    """First digits of the numbers between two of equally many digits, and the bounds of what stands behind them."""
    if low[0] == high[0]:
        return [(text(low[0]), low[1:], high[1:])]
    rest, first, last = len(low) - 1, int(low[0]), int(high[0])
    parts = []
    if low[1:].strip("0"):
        parts.append((text(low[0]), low[1:], "9" * rest))
        first += 1
    if high[1:].strip("9"):
        parts.append((text(high[0]), "0" * rest, high[1:]))
        last -= 1
    if first <= last:
        parts.append((_between(first, last), "0" * rest, "9" * rest))
    return parts


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


def _plain_at_least(value: Fraction) -> Language:
    whole, fraction = _decimal(value)
    parts: list[Language] = [cat(text("." + fraction), _DIGITS)] if fraction else [_FRACTION]
    for index, digit in enumerate(fraction):
        parts.append(cat(text("." + fraction[:index]), _between(int(digit) + 1, 9), _DIGITS))
    return alt(cat(_whole_at_least(int(whole) + 1), _FRACTION), cat(text(whole), alt(*parts)))


def _plain_at_most(value: Fraction) -> Language:
    whole, fraction = _decimal(value)
    parts: list[Language] = [EPSILON, cat(text("." + fraction), _ZEROS)] if fraction else [_NO_FRACTION]
    for index, digit in enumerate(fraction):
        if index:
            parts.append(text("." + fraction[:index]))
        parts.append(cat(text("." + fraction[:index]), _between(0, int(digit) - 1), _DIGITS))
    return alt(cat(_whole_at_most(int(whole) - 1), _FRACTION), cat(text(whole), alt(*parts)))


def _among(values: list[int]) -> Language:
    """One of `values`, over 0 and under 100; a run of them by its tens."""
    parts = []
    for tens in range(10):
        ones = [value % 10 for value in values if value // 10 == tens]
        if ones:
            parts.append(cat(text(str(tens)) if tens else EPSILON, chars((48 + digit, 48 + digit) for digit in ones)))
    return alt(*parts)


@lru_cache(maxsize=512)
def _exponents(values: tuple[int, ...]) -> Language:
    """Spellings of exponents, with optional sign and leading zeros."""
    parts = []
    positive = [value for value in values if value > 0]
    negative = [-value for value in values if value < 0]
    if positive:
        parts.append(cat(alt(EPSILON, text("+")), _ZEROS, _among(positive)))
    if negative:
        parts.append(cat(text("-"), _ZEROS, _among(negative)))
    if 0 in values:
        parts.append(cat(_ANY_SIGN, repeat(text("0"), 1, None)))
    return alt(*parts)


def _scientific(low: Fraction, over: bool, high: Fraction | None, tight: bool) -> Language:
    """Unsigned spellings with one digit before the point and an exponent; arguments as in `_magnitudes`."""
    fraction = alt(EPSILON, cat(text("."), repeat(_DIGIT, 1, _SAFE_DIGITS - 1 if tight else None)))
    inside, parts = [], []
    for exponent in range(-_MAX_EXPONENT, _MAX_EXPONENT + 1):
        unit = Fraction(10) ** exponent
        above = low <= unit
        below = high is None or high >= unit * 10
        if above and below:
            inside.append(exponent)
        elif low < unit * 10 and (high is None or high >= unit):
            mantissa = [cat(_NONZERO, fraction)]
            if not above:
                mantissa.append(_plain_at_least(low / unit))
            if not below and high is not None:
                mantissa.append(_plain_at_most(high / unit))
            parts.append(cat(both(*mantissa), _E, _exponents((exponent,))))
    if inside:
        parts.append(cat(_NONZERO, fraction, _E, _exponents(tuple(inside))))
    if low == 0 and not over:
        parts.append(cat(text("0"), _NO_FRACTION, _E, _ANY_SIGN, repeat(_DIGIT, 1, 2)))
    return alt(*parts)


@lru_cache(maxsize=4096)
def _spelling(value: Fraction) -> Language:
    """All plain and normalised scientific spellings of one number."""
    if value == 0:
        return cat(_SIGN, text("0"), _NO_FRACTION, alt(EPSILON, cat(_E, _ANY_SIGN, repeat(_DIGIT, 1, 2))))
    whole, fraction = _decimal(abs(value))
    plain = cat(text(f"{whole}.{fraction}"), _ZEROS) if fraction else cat(text(whole), _NO_FRACTION)
    digits = (whole + fraction).lstrip("0").rstrip("0")
    exponent = len(whole) - 1 if whole != "0" else -(len(fraction) - len(fraction.lstrip("0")) + 1)
    if value.denominator == 1 and _inner(value, False, up=True) != value:
        return text(str(value))
    parts = [plain]
    if abs(exponent) <= _MAX_EXPONENT:
        mantissa = cat(text(f"{digits[0]}.{digits[1:]}"), _ZEROS) if digits[1:] else cat(text(digits), _NO_FRACTION)
        parts.append(cat(mantissa, _E, _exponents((exponent,))))
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
