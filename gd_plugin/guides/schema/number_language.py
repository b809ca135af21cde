"""Numbers -> the language of their JSON spellings.

Every plain spelling (`10`, `10.0`, `10.00`), and scientific ones. Without bounds those are all of JSON's; inside bounds
they have one digit before the point and an exponent of at most 99 (`1e1`, `5.25E-07`, as programs print them).
No reader's binary rounding carries a number over a bound. Beside excluded values and multiples at most 15 digits are
significant where there is a point or an exponent, for the same reason.
"""

import sys
from collections.abc import Iterable
from dataclasses import replace
from fractions import Fraction
from functools import lru_cache
from math import ceil, floor, inf, nextafter

from gd_plugin.guides.schema.digits import (
    DIGIT,
    DIGITS,
    FRACTION,
    INTEGER,
    MAX_BOUND_DIGITS,
    NO_FRACTION,
    NONZERO,
    SIGN,
    WHOLE,
    ZERO_FRACTION,
    ZEROS,
    TooComplexError,
    by_first_digit,
    decimal,
    fraction_between,
    plain_at_least,
    plain_at_most,
    whole_at_least,
    whole_between,
)
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
from gd_plugin.guides.schema.multiples import multiples
from gd_plugin.guides.schema.numbers import ANY_NUMBER, Numbers

__all__ = ["number_language"]

_E = words("eE")
_ANY_SIGN = alt(EPSILON, words("+-"))
_MAX_EXPONENT = 99
_SAFE_DIGITS = 15
# digits before the point of a float that programs print without an exponent
_PLAIN_DIGITS = 16
# digits that tell every binary float from its neighbours
_FLOAT_DIGITS = 17
# of integers without bounds: what 15 digits and an exponent of 99 are printed with, and more
_MAX_SPELLED_EXPONENT = 199
# integers up to it have a binary float of their own
_EXACT_INTEGERS = 1 << 53
_ZERO = Fraction(0)
# fixed values that are spelled in every way
_MAX_SPELLED = 5_000
# values in a row from which they are a range
_LONG_RUN = 10


def number_language(numbers: Numbers) -> Language:
    """The JSON spellings of the members; see the module for which.

    Raises:
        TooComplexError: no language of reasonable size says it.
    """
    numbers = numbers.settled()
    if numbers.digits_only and numbers.values is None and not numbers.multiple and not numbers.not_multiples:
        return _digits_only(numbers)
    found = _language(numbers) if numbers.values is None else _listed(sorted(numbers.values))
    return both(found, WHOLE) if numbers.digits_only else found


def _digits_only(numbers: Numbers) -> Language:
    """The integers inside the bounds, in digits."""
    low, high = _integer_bounds(numbers)
    parts = []
    if high is None or high >= 0:
        parts.append(whole_between(max(low or 0, 0), high))
    if low is None or low <= 0:
        parts.append(cat(text("-"), whole_between(max(-(high or 0), 0), None if low is None else -low)))
    outside = [str(value) for value in numbers.excluded] + ["-0"] * (0 in numbers.excluded)
    return both(alt(*parts), negate(words(outside)))


@lru_cache(maxsize=512)
def _language(numbers: Numbers) -> Language:
    if numbers.integer and numbers.multiple is not None:
        step = numbers.multiples_of(Fraction(1)).multiple
        numbers = replace(numbers, multiple=None if step == 1 else step)
    plain = numbers == replace(ANY_NUMBER, integer=numbers.integer)
    if plain and numbers.integer is None:
        exponent = alt(EPSILON, cat(_E, _ANY_SIGN, repeat(DIGIT, 1, None)))
        return cat(SIGN, INTEGER, FRACTION, exponent)
    if plain and numbers.integer:
        return alt(cat(SIGN, INTEGER), _spelled_integers())
    parts = [_integer_range(numbers) if numbers.integer and numbers.multiple is None else _range_language(numbers)]
    if numbers.integer is False:
        parts.append(cat(SIGN, INTEGER, text("."), DIGITS, NONZERO, DIGITS))
    if numbers.multiple is not None:
        parts.append(multiples(numbers.multiple))
    for step in numbers.not_multiples:
        parts.append(negate(multiples(step)))
        # readers divide by a step that is no whole number as floats, of which large ones are multiples of anything
        short = alt(text("0"), cat(NONZERO, repeat(DIGIT, 0, _SAFE_DIGITS - 1)))
        parts.append(cat(SIGN, INTEGER if step.denominator == 1 else short, FRACTION))
    for value in sorted(numbers.excluded):
        parts.append(negate(_spelling(value)))
    return both(*parts)


@lru_cache(maxsize=1)
def _spelled_integers() -> Language:
    """Integers written with a point or an exponent, no larger than binary readers keep exact."""
    mantissa = cat(NONZERO, repeat(DIGIT, 0, _SAFE_DIGITS - 1))
    plus = alt(EPSILON, text("+"))
    forms = [
        cat(alt(text("0"), cat(NONZERO, repeat(DIGIT, 0, _PLAIN_DIGITS - 1))), ZERO_FRACTION),
        cat(alt(text("0"), mantissa), NO_FRACTION, _E, plus, repeat(DIGIT, 1, 2)),
    ]
    forms.extend(_spelled_fractions(range(1, _MAX_SPELLED_EXPONENT + 1)))
    return cat(SIGN, alt(*forms))


def _spelled_fractions(exponents: Iterable[int]) -> list[Language]:
    """`d.ddd` times ten to one of the exponents, over 0, for integers: no more digits than the exponent moves."""
    by_digits: dict[int, list[int]] = {}
    for exponent in exponents:
        by_digits.setdefault(min(exponent, _FLOAT_DIGITS - 1), []).append(exponent)
    return [
        cat(NONZERO, text("."), repeat(DIGIT, 1, digits), ZEROS, _E, _exponents(tuple(same)))
        for digits, same in by_digits.items()
    ]


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
    if any(bound is not None and abs(bound) >= 10**MAX_BOUND_DIGITS for bound in (low, high)):
        raise TooComplexError(f"a bound with over {MAX_BOUND_DIGITS} digits")
    return low, high


def _integer_magnitudes(low: int, high: int | None) -> Language:
    """Unsigned spellings of the integers between `low` >= 0 and `high`.

    Points and exponents are there only where readers that use binary floats keep the value.
    """
    parts = [whole_between(low, high)]
    low = int(_printed(_inner(Fraction(low), False, up=True), up=True))
    high = None if high is None else int(_printed(_inner(Fraction(high), False, up=False), up=False))
    largest = 10**_PLAIN_DIGITS - 1
    parts.append(cat(whole_between(low, largest if high is None else min(high, largest)), ZERO_FRACTION))
    full: list[int] = []
    for exponent in range(_MAX_EXPONENT + 1):
        first, last = max(low, 10**exponent), 10 ** (exponent + 1) - 1
        last = last if high is None else min(high, last)
        if first > last:
            continue
        if first == 10**exponent and last == 10 ** (exponent + 1) - 1:
            full.append(exponent)
        else:
            parts.append(cat(_mantissas(first, last), _E, _exponents((exponent,))))
    parts.extend(_spelled_fractions(exponent for exponent in full if exponent > 0))
    if full:
        parts.append(cat(NONZERO, NO_FRACTION, _E, _exponents(tuple(full))))
    if low == 0:
        parts.append(cat(text("0"), NO_FRACTION, _E, _ANY_SIGN, repeat(DIGIT, 1, 2)))
    return alt(*parts)


def _mantissas(low: int, high: int) -> Language:
    """`d.ddd` of the integers between two of equally many digits; the exponent is one less than these."""
    parts = []
    for digits, first, last in by_first_digit(str(low), str(high)):
        fraction = cat(text("."), fraction_between(first, last))
        parts.append(cat(digits, fraction if first.strip("0") else alt(EPSILON, fraction, ZERO_FRACTION)))
    return alt(*parts)


def _range_language(numbers: Numbers) -> Language:
    """Spellings inside the bounds."""
    tight = bool(numbers.excluded or numbers.not_multiples or numbers.multiple or numbers.integer is False)
    low = None if numbers.low is None else _inner(numbers.low, numbers.low_open, up=True)
    high = None if numbers.high is None else _inner(numbers.high, numbers.high_open, up=False)
    over, under = low == 0 and numbers.low_open, high == 0 and numbers.high_open
    parts = []
    if any(bound is not None and abs(bound) > _EXACT_INTEGERS for bound in (numbers.low, numbers.high)):
        parts.append(both(_integer_range(numbers), cat(SIGN, INTEGER)))
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


def _printed(bound: Fraction, up: bool) -> Fraction:
    """The outermost number that readers of binary floats take for a bound that is one of them."""
    if bound.denominator != 1 or not _EXACT_INTEGERS < abs(bound) <= Fraction(sys.float_info.max):
        return bound
    return (min if up else max)(bound, Fraction(repr(float(bound))))


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
    plain = _plain_over_zero() if over else plain_at_least(low)
    if high is not None:
        plain = both(plain, plain_at_most(high))
    if tight:
        plain = both(plain, alt(INTEGER, _safe_decimals()))
    elif low == 0 and high is None and not over:
        return cat(INTEGER, FRACTION, alt(EPSILON, cat(_E, _ANY_SIGN, repeat(DIGIT, 1, None))))
    high = None if high is None else _printed(high, up=False)
    return alt(plain, _scientific(_printed(low, up=True), over, high, tight))


def _listed(values: list[Fraction]) -> Language:
    """Spellings of fixed values; runs of integers as ranges. Of very many, the usual spelling alone."""
    if len(values) > _MAX_SPELLED:
        return words(str(value) if value.denominator == 1 else repr(float(value)) for value in values)
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
    small = cat(text("0."), repeat(text("0"), 0, _MAX_EXPONENT), NONZERO, DIGITS)
    return alt(cat(whole_at_least(1), FRACTION), small)


@lru_cache(maxsize=1)
def _safe_decimals() -> Language:
    """Unsigned plain decimals of at most 15 significant digits."""
    forms = [cat(text("0"), alt(EPSILON, cat(text("."), repeat(text("0"), 0, 99), repeat(DIGIT, 1, _SAFE_DIGITS))))]
    for count in range(1, _SAFE_DIGITS + 1):
        whole = cat(NONZERO, repeat(DIGIT, count - 1, count - 1))
        rest = _SAFE_DIGITS - count
        forms.append(cat(whole, alt(EPSILON, cat(text("."), repeat(DIGIT, 1, rest))) if rest else EPSILON))
    return alt(*forms)


def _among(values: list[int]) -> Language:
    """One of `values`, over 0; a run of them by its tens."""
    parts = []
    for tens in range(max(values) // 10 + 1):
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
        parts.append(cat(alt(EPSILON, text("+")), ZEROS, _among(positive)))
    if negative:
        parts.append(cat(text("-"), ZEROS, _among(negative)))
    if 0 in values:
        parts.append(cat(_ANY_SIGN, repeat(text("0"), 1, None)))
    return alt(*parts)


def _scientific(low: Fraction, over: bool, high: Fraction | None, tight: bool) -> Language:
    """Unsigned spellings with one digit before the point and an exponent; arguments as in `_magnitudes`."""
    fraction = alt(EPSILON, cat(text("."), repeat(DIGIT, 1, _SAFE_DIGITS - 1 if tight else None)))
    inside, parts = [], []
    for exponent in range(-_MAX_EXPONENT, _MAX_EXPONENT + 1):
        unit = Fraction(10) ** exponent
        above = low <= unit
        below = high is None or high >= unit * 10
        if above and below:
            inside.append(exponent)
        elif low < unit * 10 and (high is None or high >= unit):
            mantissa = [cat(NONZERO, fraction)]
            if not above:
                mantissa.append(plain_at_least(low / unit))
            if not below and high is not None:
                mantissa.append(plain_at_most(high / unit))
            parts.append(cat(both(*mantissa), _E, _exponents((exponent,))))
    if inside:
        parts.append(cat(NONZERO, fraction, _E, _exponents(tuple(inside))))
    if low == 0 and not over:
        parts.append(cat(text("0"), NO_FRACTION, _E, _ANY_SIGN, repeat(DIGIT, 1, 2)))
    return alt(*parts)


@lru_cache(maxsize=4096)
def _spelling(value: Fraction) -> Language:
    """All plain and normalised scientific spellings of one number."""
    if value == 0:
        return cat(SIGN, text("0"), NO_FRACTION, alt(EPSILON, cat(_E, _ANY_SIGN, repeat(DIGIT, 1, 2))))
    if value.denominator == 1 and _inner(value, False, up=True) != value:
        return text(str(value))
    whole, fraction = decimal(abs(value))
    parts = [cat(text(f"{whole}.{fraction}"), ZEROS) if fraction else cat(text(whole), NO_FRACTION)]
    parts.append(_normalised(whole, fraction))
    for up in (False, True):
        # a float is printed above or below what it holds
        if (printed := _printed(abs(value), up=up)) != abs(value):
            parts.append(_normalised(*decimal(printed)))
    return cat(text("-") if value < 0 else EPSILON, alt(*parts))


def _normalised(whole: str, fraction: str) -> Language:
    """`d.ddd` and an exponent, of the number with these digits before and behind the point."""
    digits = (whole + fraction).lstrip("0").rstrip("0")
    exponent = len(whole) - 1 if whole != "0" else -(len(fraction) - len(fraction.lstrip("0")) + 1)
    mantissa = cat(text(f"{digits[0]}.{digits[1:]}"), ZEROS) if digits[1:] else cat(text(digits), NO_FRACTION)
    return cat(mantissa, _E, _exponents((exponent,)))
