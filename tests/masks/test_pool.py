"""BitmaskPool: rows come and go; growing keeps their content."""

import random

from gd_plugin.masks.pool import BitmaskPool


def test_rows_in_use_are_distinct_and_keep_their_content() -> None:
    rng = random.Random(0)
    pool = BitmaskPool(70, 1)
    held: dict[int, int] = {}
    for number in range(1, 600):
        if held and rng.random() < 0.4:
            row = rng.choice(list(held))
            assert pool.bitmask[row].tolist() == [held.pop(row)] * 3
            pool.give_back(row)
        else:
            row = pool.take()
            assert row not in held
            pool.bitmask[row] = held[row] = number
        assert pool.num_used == len(held)
    for row, number in held.items():
        assert pool.bitmask[row].tolist() == [number] * 3


def test_a_row_given_back_is_the_next_one_taken() -> None:
    """Its memory is warm."""
    pool = BitmaskPool(32, 8)
    rows = [pool.take() for _ in range(3)]
    pool.give_back(rows[1])
    assert pool.take() == rows[1]


def test_growth_is_by_need() -> None:
    pool = BitmaskPool(32, 2)
    for _ in range(1000):
        pool.give_back(pool.take())
    assert pool.bitmask.shape == (2, 1)
