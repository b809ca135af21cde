"""Rows of mask words against Python sets: only bits below the vocabulary size count, and the sign bit does."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import gd_plugin as gd
from gd_plugin.masks.bitmask import (
    few_legal_tokens,
    first_valid_tokens,
    legal_columns,
    num_mask_words,
    rows_have_valid_token,
    token_ids_to_words,
)

WIDTHS = [1, 31, 32, 33, 63, 64, 65, 100, 49152, 49153, 49170]


def row_of(tokens: set[int], words: int) -> torch.Tensor:
    """Set bits by plain arithmetic."""
    values = [0] * words
    for token in tokens:
        values[token // 32] |= 1 << (token % 32)
    return torch.tensor([value - (1 << 32) if value >> 31 else value for value in values], dtype=torch.int32)


@given(st.integers(1, 200), st.lists(st.sets(st.integers(0, 255)), min_size=1, max_size=4))
def test_only_bits_below_the_vocabulary_size_count(vocab_size: int, rows: list[set[int]]) -> None:
    """R1-R4: stray bits in the last word and whole words behind it are ignored, whatever they hold."""
    bitmask = torch.stack([row_of(tokens, 8) for tokens in rows])
    expected = [{token for token in tokens if token < vocab_size} for tokens in rows]
    assert rows_have_valid_token(bitmask, vocab_size).tolist() == [bool(tokens) for tokens in expected]
    assert first_valid_tokens(bitmask, vocab_size).tolist() == [min(tokens, default=-1) for tokens in expected]
    for row, tokens in zip(bitmask, expected, strict=True):
        assert gd.row_has_valid_token(row, vocab_size) is bool(tokens)


@pytest.mark.parametrize("width", WIDTHS)
def test_each_single_bit(width: int) -> None:
    words = num_mask_words(width)
    for token in {0, 30, 31, 32, 63, width - 1, width // 2} & set(range(width)):
        row = row_of({token}, words)
        assert gd.row_has_valid_token(row, width)
        assert not gd.row_has_valid_token(row, token) if token else True
        assert first_valid_tokens(row[None], width).tolist() == [token]
    if width % 32:
        stray = row_of(set(range(width, 32 * words)), words)
        assert not gd.row_has_valid_token(stray, width)
        assert first_valid_tokens(stray[None], width).tolist() == [-1]


@pytest.mark.parametrize("width", WIDTHS)
def test_allocation(width: int) -> None:
    bitmask = gd.allocate_token_bitmask(3, width)
    assert bitmask.shape == (3, -(-width // 32))
    assert bitmask.dtype == torch.int32 and not bitmask.any()
    assert gd.allocate_token_bitmask(0, width).shape[0] == 0


@given(st.sets(st.integers(0, 127)), st.integers(0, 160))
def test_unpacking(tokens: set[int], columns: int) -> None:
    assert set(legal_columns(row_of(tokens, 4), columns).nonzero()[0].tolist()) == {t for t in tokens if t < columns}
    assert token_ids_to_words(sorted(tokens), 4).tolist() == row_of(tokens, 4).tolist()


@pytest.mark.parametrize(
    "make",
    [
        lambda: gd.allocate_token_bitmask(-1, 32),
        lambda: gd.allocate_token_bitmask(1, 0),
        lambda: gd.row_has_valid_token(torch.zeros(1, 1, dtype=torch.int32), 32),
        lambda: gd.row_has_valid_token(torch.zeros(1, dtype=torch.int32), 33),
        lambda: gd.row_has_valid_token(torch.zeros(1, dtype=torch.int64), 32),
        lambda: rows_have_valid_token(torch.zeros(2, dtype=torch.int32), 32),
    ],
)
def test_wrong_arguments_are_refused(make: object) -> None:
    with pytest.raises(ValueError, match=r"."):
        make()  # type: ignore[operator]


@given(st.integers(1, 200), st.sets(st.integers(0, 255), max_size=20), st.integers(1, 20))
def test_few_legal_tokens_are_listed_and_many_are_not(vocab_size: int, tokens: set[int], limit: int) -> None:
    words = num_mask_words(vocab_size)
    # bits behind the vocabulary, in its last word, do not count
    row = row_of({token for token in tokens if token < 32 * words}, words)
    legal = sorted(token for token in tokens if token < vocab_size)
    strays = sum(vocab_size <= token < 32 * words for token in tokens)
    found = few_legal_tokens(row, vocab_size, limit)
    if len(legal) > limit:
        assert found is None
    elif len(legal) + strays <= limit:
        assert found == legal
    else:
        assert found in (None, legal)
