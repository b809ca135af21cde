"""Sets of numbers: bounds, multiples, fixed values, as exact fractions read from the schema's decimal text.

In:  what keywords say.
Out: `Numbers`, which can be intersected, tested and listed; number_language.py writes them.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from fractions import Fraction
from math import ceil, floor, lcm

__all__ = ["ANY_NUMBER", "MAX_VALUES", "Numbers", "read_number"]

# values that are listed one by one
MAX_VALUES = 1000


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
                if last - first < (MAX_VALUES if step != 1 else 3 if not self.excluded else 100):
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


ANY_NUMBER = Numbers()
