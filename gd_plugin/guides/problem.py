"""What lint and validation say: plain records, no logic."""

from dataclasses import dataclass

__all__ = ["Problem"]


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
