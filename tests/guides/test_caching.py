"""The cache of texts is bounded by their length."""

import gc
import weakref

import pytest

import gd_plugin as gd
from gd_plugin.guides.caching import text_cache


class Made:
    pass


def counted():
    calls, made = [], weakref.WeakSet()

    @text_cache
    def make(text, start="root"):
        """Make it."""
        calls.append(text)
        if text == "wrong":
            raise ValueError(text)
        made.add(thing := Made())
        return thing

    return make, calls, made


def test_what_was_made_is_made_once():
    make, calls, _ = counted()
    assert (make("a") is make("a") and make("a", start="b") is not make("a") is make("a", "root")) or len(calls) == 3
    assert make.__doc__ == "Make it." and make.__name__ == "make"


def test_errors_are_raised_each_time():
    make, calls, _ = counted()
    for _ in range(2):
        with pytest.raises(ValueError, match="wrong"):
            make("wrong")
    assert calls == ["wrong", "wrong"]


def test_texts_are_bounded_by_their_length_and_the_last_one_is_kept():
    make, _, made = counted()
    for number in range(100):
        make(f"{number} " + "x" * 50_000)
    gc.collect()
    assert len(made) == 5
    long = make("y" * 10_000_000)
    gc.collect()
    assert len(made) == 1 and make("y" * 10_000_000) is long
    # many short ones are bounded too
    for number in range(1000):
        make(f"{number}")
    gc.collect()
    assert 100 < len(made) < 300


def test_guides_count_by_their_text():
    make, _, made = counted()
    for number in range(20):
        make(gd.Guide.choice([f"{number}" + "x" * 100_000]))
    gc.collect()
    assert len(made) == 2
