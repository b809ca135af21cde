"""printable: text that neither a terminal nor a page can be harmed by.

In:  text a model or a stranger wrote.      Out: the same text, with everything that is obeyed or not shown written out.
"""

__all__ = ["printable"]

_NAMED = {0x0A: "\\n", 0x0D: "\\r", 0x09: "\\t"}


def printable(text: str, keep: str = "") -> str:
    """Return `text` with control characters, those that turn a line's direction, and unusual blanks as escapes.

    Args:
        text: any text.
        keep: characters that stay as they are.
    """
    if text.isprintable():
        return text
    return "".join(c if c in keep or c.isprintable() else _escape(ord(c)) for c in text)


def _escape(code: int) -> str:
    if code in _NAMED:
        return _NAMED[code]
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"
