"""Languages of digits: integers and decimals between bounds, unsigned, without exponents.

In:  bounds that are not negative.
Out: every plain spelling of what lies between them: no leading zeros, any zeros behind a fraction.
"""

from fractions import Fraction

from gd_plugin.guides.schema.languages import EMPTY, EPSILON, Language, alt, cat, chars, repeat, text

__all__ = [
    "DIGIT",
    "DIGITS",
    "FRACTION",
    "INTEGER",
    "MAX_BOUND_DIGITS",
    "NONZERO",
    "NO_FRACTION",
    "SIGN",
    "WHOLE",
    "ZEROS",
    "ZERO_FRACTION",
    "TooComplexError",
    "between",
    "by_first_digit",
    "decimal",
    "fraction_between",
    "plain_at_least",
    "plain_at_most",
    "whole_at_least",
    "whole_at_most",
    "whole_between",
]

DIGIT = chars([(48, 57)])
NONZERO = chars([(49, 57)])
DIGITS = repeat(DIGIT, 0, None)
ZEROS = repeat(text("0"), 0, None)
SIGN = alt(EPSILON, text("-"))
FRACTION = alt(EPSILON, cat(text("."), repeat(DIGIT, 1, None)))
ZERO_FRACTION = cat(text("."), repeat(text("0"), 1, None))
NO_FRACTION = alt(EPSILON, ZERO_FRACTION)
INTEGER = alt(text("0"), cat(NONZERO, DIGITS))
WHOLE = cat(SIGN, INTEGER)
# digits of a bound, before a schema counts as too complex
MAX_BOUND_DIGITS = 400


class TooComplexError(Exception):
    """No language of reasonable size says it."""


def decimal(value: Fraction) -> tuple[str, str]:
    """Digits before and behind the point of a value that has finitely many; none behind it for an integer."""
    scale = 0
    while (value * 10**scale).denominator != 1:
        scale += 1
        if scale > MAX_BOUND_DIGITS:
            raise TooComplexError(f"a bound with over {MAX_BOUND_DIGITS} digits")
    if value >= 10**MAX_BOUND_DIGITS:
        raise TooComplexError(f"a bound with over {MAX_BOUND_DIGITS} digits")
    digits = str(int(value * 10**scale)).rjust(scale + 1, "0")
    return (digits[:-scale], digits[-scale:].rstrip("0")) if scale else (digits, "")


def between(low: int, high: int) -> Language:
    """One digit from `low` to `high`."""
    return chars([(48 + low, 48 + high)]) if low <= high else EMPTY


def whole_between(low: int, high: int | None) -> Language:
    """Digits of the integers from `low` to `high`."""
    if high is None:
        return whole_at_least(low)
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
        return repeat(DIGIT, len(low), len(low))
    return alt(*(cat(digits, _same_length(first, last)) for digits, first, last in by_first_digit(low, high)))


def by_first_digit(low: str, high: str) -> list[tuple[Language, str, str]]:
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
        parts.append((between(first, last), "0" * rest, "9" * rest))
    return parts


def fraction_between(low: str, high: str) -> Language:
    """Digits between two texts of equally many, not none; zeros at the end may be left out, or more be written."""
    if not low.strip("0") and not high.strip("9"):
        return cat(repeat(DIGIT, 1, len(low)), ZEROS) if low else repeat(text("0"), 1, None)
    parts = []
    for digits, first, last in by_first_digit(low, high):
        rest = fraction_between(first, last)
        parts.append(cat(digits, rest if first.strip("0") else alt(EPSILON, rest)))
    return alt(*parts)


def whole_at_least(value: int) -> Language:
    """Digits of the integers from `value` on."""
    digits = str(value)
    parts = [cat(NONZERO, repeat(DIGIT, len(digits), None))]
    for index, digit in enumerate(digits):
        rest = len(digits) - index - 1
        parts.append(cat(text(digits[:index]), between(int(digit) + 1, 9), repeat(DIGIT, rest, rest)))
    return alt(*parts, text(digits)) if value else INTEGER


def whole_at_most(value: int) -> Language:
    """Digits of the integers up to `value`."""
    if value < 0:
        return EMPTY
    digits = str(value)
    parts = [text("0"), text(digits)]
    if len(digits) > 1:
        parts.append(cat(NONZERO, repeat(DIGIT, 0, len(digits) - 2)))
    for index, digit in enumerate(digits):
        rest = len(digits) - index - 1
        first = between(0 if index else 1, int(digit) - 1)
        parts.append(cat(text(digits[:index]), first, repeat(DIGIT, rest, rest)))
    return alt(*parts)


def plain_at_least(value: Fraction) -> Language:
    """Decimals from `value` on."""
    whole, fraction = decimal(value)
    parts: list[Language] = [cat(text("." + fraction), DIGITS)] if fraction else [FRACTION]
    for index, digit in enumerate(fraction):
        parts.append(cat(text("." + fraction[:index]), between(int(digit) + 1, 9), DIGITS))
    return alt(cat(whole_at_least(int(whole) + 1), FRACTION), cat(text(whole), alt(*parts)))


def plain_at_most(value: Fraction) -> Language:
    """Decimals up to `value`."""
    whole, fraction = decimal(value)
    parts: list[Language] = [EPSILON, cat(text("." + fraction), ZEROS)] if fraction else [NO_FRACTION]
    for index, digit in enumerate(fraction):
        if index:
            parts.append(text("." + fraction[:index]))
        parts.append(cat(text("." + fraction[:index]), between(0, int(digit) - 1), DIGITS))
    return alt(cat(whole_at_most(int(whole) - 1), FRACTION), cat(text(whole), alt(*parts)))
