"""What lint and validation say of a guide, and how its places are named."""

from dataclasses import dataclass

__all__ = ["Problem", "escape_pointer"]


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing a backend cannot enforce, or one thing wrong with a guide.

    Attributes:
        pointer: JSON pointer or text position of the construct; "#" is the whole guide.
        keyword: the keyword or construct.
        backend: the backend that says so; "" when it holds for all.
        message: what is wrong and what to do.
    """

    pointer: str
    keyword: str
    backend: str
    message: str


def escape_pointer(step: str | int) -> str:
    """Return a key or an index as one step of a JSON pointer."""
    return str(step).replace("~", "~0").replace("/", "~1")
