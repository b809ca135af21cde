"""What guides' texts mean, remembered: bounded by how long the texts are, because what is made of a text grows with it.

A cache bounded by its number of entries would hold dozens of whole grammars of a megabyte each, if somebody sends them.
"""

import threading
from collections import OrderedDict
from collections.abc import Callable
from functools import wraps
from typing import Final, ParamSpec, TypeVar

__all__ = ["text_cache"]

P = ParamSpec("P")
R = TypeVar("R")

# characters that an entry counts for besides its text's own
_ENTRY_CHARS: Final = 1000
# about 10 MB of parsed grammars
_MAX_CHARS: Final = 1 << 18


def text_cache(function: Callable[P, R]) -> Callable[P, R]:
    """Remember what `function` has returned for its last texts, of 2**18 characters together, or for the last one alone.

    Its arguments are texts, guides and other hashable things. Errors are not remembered. Thread-safe; two threads may both
    call the function for the same text.
    """
    lock = threading.Lock()
    held: OrderedDict[object, tuple[R, int]] = OrderedDict()
    num_chars = 0

    @wraps(function)
    def cached(*args: P.args, **kwargs: P.kwargs) -> R:
        nonlocal num_chars
        key = (args, tuple(sorted(kwargs.items())))
        with lock:
            found = held.get(key)
            if found is not None:
                held.move_to_end(key)
                return found[0]
        value = function(*args, **kwargs)
        size = _ENTRY_CHARS + sum(map(_length, (*args, *kwargs.values())))
        with lock:
            if key not in held:
                held[key] = value, size
                num_chars += size
            while num_chars > _MAX_CHARS and len(held) > 1:
                num_chars -= held.popitem(last=False)[1][1]
        return value

    return cached


def _length(argument: object) -> int:
    # a guide's text is its attribute `guide`
    text = getattr(argument, "guide", argument)
    return len(text) if isinstance(text, str) else 0
