"""What is said where no token is legal, in every engine alike."""

from gd_plugin.errors import DeadEndError

__all__ = ["dead_end_error"]

_SHOWN = 60


def dead_end_error(num_tokens: int, text: str | None = None, *, row: int | None = None) -> DeadEndError:
    """Return the error of a row in which nothing can follow.

    Args:
        num_tokens: tokens generated so far.
        text: what they spell, where that is known; its end is shown.
        row: row of the batch, where there is one.
    """
    where = "" if row is None else f"row {row}: "
    behind = "" if text is None else f" {_end_of(text)!r}"
    return DeadEndError(
        f"{where}no token can follow{behind} after {num_tokens} tokens; the guide allows no text that this vocabulary can "
        "spell here, so change the guide, or pass on_dead_end='release' to go on unguided",
        row=row,
        num_tokens=num_tokens,
        text=text,
    )


def _end_of(text: str) -> str:
    return text if len(text) <= _SHOWN else "..." + text[3 - _SHOWN :]
