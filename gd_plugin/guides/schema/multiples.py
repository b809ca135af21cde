"""Multiples of a step -> the language of their plain spellings, by automata over remainders."""

from fractions import Fraction
from functools import lru_cache

from gd_plugin.guides.schema.digits import DIGITS, INTEGER, NO_FRACTION, NONZERO, SIGN, ZEROS, TooComplexError, decimal
from gd_plugin.guides.schema.languages import EMPTY, EPSILON, Language, alt, both, cat, repeat, text, words
from gd_plugin.guides.schema.numbers import MAX_VALUES

__all__ = ["multiples"]

_MAX_RESIDUES = 11


@lru_cache(maxsize=256)
def multiples(step: Fraction) -> Language:
    """Plain spellings of the multiples of `step` = a / b: the integer part runs through residues modulo a."""
    a, b = step.numerator, step.denominator
    if b > MAX_VALUES:
        raise TooComplexError(f"multiples of {float(step)}")
    parts = []
    for count in range(b):
        whole, rest = divmod(count * step, 1)
        _, fraction = decimal(rest)
        behind = cat(text("." + fraction), ZEROS) if fraction else NO_FRACTION
        parts.append(cat(_residues(int(whole) % a, a), behind))
    return cat(SIGN, alt(*parts))


def _residues(residue: int, modulus: int) -> Language:
    """Unsigned integers that leave `residue` modulo `modulus`."""
    tail, rest, length = 1, modulus, 0
    while rest % 2 == 0 or rest % 5 == 0:
        factor = 10 if rest % 10 == 0 else 2 if rest % 2 == 0 else 5
        rest //= factor
        tail *= factor
    while 10**length % tail:
        length += 1
    if rest > _MAX_RESIDUES or 10**length > 100 * MAX_VALUES:
        raise TooComplexError(f"multiples of {modulus}")
    parts: list[Language] = [INTEGER]
    if tail > 1:
        endings = [str(value).rjust(length, "0") for value in range(residue % tail, 10**length, tail)]
        short = [str(value) for value in range(residue % tail, 10**length, tail)]
        parts.append(alt(words(short), cat(NONZERO, DIGITS, words(endings))))
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
