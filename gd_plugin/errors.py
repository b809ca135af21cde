"""One tree of exceptions: everything gd_plugin raises on purpose is a `GuidedDecodingError`.

    GuidedDecodingError
      GuideError (ValueError)                 the guide itself is wrong
        InvalidGuideError                     not well formed
        UnsupportedGuideError                 well formed, but no allowed backend can enforce it
        UnsatisfiableGuideError               nothing matches it, or nothing this tokenizer can spell
        GuideTooLargeError                    over a limit of GuidedDecodingConfig
      CompileTimeoutError                     compiling took longer than compile_timeout_s
      VocabularyError (ValueError)            tokenizer and model cannot be reconciled
      BackendNotInstalledError (ImportError)  names the pip command
      MatcherError                            an engine failed while it was matching one request
      DeadEndError                            no token is legal and the guide is not complete
      TokenRejectedError                      a token that had to be accepted was refused
      RollbackError (ValueError)              more tokens than have been accepted

Messages say what is wrong, where, and what to do; the machine-readable parts are also attributes. What to do about a
guide is its error's `hint`, which `str(error)` puts behind the message. Every class survives pickling: the message is the
only positional argument and attributes are optional keywords.
"""

from typing import Self

__all__ = [
    "BackendNotInstalledError",
    "CompileTimeoutError",
    "DeadEndError",
    "GuideError",
    "GuideTooLargeError",
    "GuidedDecodingError",
    "InvalidGuideError",
    "MatcherError",
    "RollbackError",
    "TokenRejectedError",
    "UnsatisfiableGuideError",
    "UnsupportedGuideError",
    "VocabularyError",
]


class GuidedDecodingError(Exception):
    """Base of every error gd_plugin raises on purpose."""


class GuideError(GuidedDecodingError, ValueError):
    """The guide itself is wrong.

    Attributes:
        pointer: JSON pointer (`#/properties/a`) or text position (`line 2, column 5`, `position 7`), if known.
        keyword: the keyword or construct at fault, if there is one.
        hint: what to do about it; every error of a guide that gd_plugin raises has one.
    """

    def __init__(
        self, message: str = "", *, pointer: str | None = None, keyword: str | None = None, hint: str | None = None
    ) -> None:
        super().__init__(message)
        self.pointer = pointer
        self.keyword = keyword
        self.hint = hint

    @property
    def message(self) -> str:
        """What is wrong and where, without the hint."""
        return str(self.args[0]) if self.args else ""

    def __str__(self) -> str:
        # what is inside another guide has its hint in the message already
        return self.message if not self.hint or self.hint in self.message else f"{self.message}; {self.hint}"

    def placed(self, message: str, pointer: str) -> Self:
        """Return the same error with the place in the guide around it."""
        placed = type(self)(message)
        placed.__dict__.update(self.__dict__)
        placed.pointer = pointer
        return placed


class InvalidGuideError(GuideError):
    """The guide is not well formed: broken JSON, regex or grammar."""


class UnsupportedGuideError(GuideError):
    """The guide is well formed, but no allowed backend can enforce it.

    Attributes:
        reasons: backend name -> why it cannot.
    """

    def __init__(
        self,
        message: str = "",
        *,
        pointer: str | None = None,
        keyword: str | None = None,
        hint: str | None = None,
        reasons: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message, pointer=pointer, keyword=keyword, hint=hint)
        self.reasons = dict(reasons or {})


class UnsatisfiableGuideError(GuideError):
    """Nothing matches the guide, or nothing that this tokenizer can spell."""


class GuideTooLargeError(GuideError):
    """The guide is over a limit of GuidedDecodingConfig.

    Attributes:
        limit: name of the configuration field, for example "max_depth", or of a limit that is fixed ("max_nesting").
        value: what was found.
    """

    def __init__(
        self,
        message: str = "",
        *,
        pointer: str | None = None,
        keyword: str | None = None,
        hint: str | None = None,
        limit: str | None = None,
        value: int | None = None,
    ) -> None:
        super().__init__(message, pointer=pointer, keyword=keyword, hint=hint)
        self.limit = limit
        self.value = value


class CompileTimeoutError(GuidedDecodingError):
    """Compiling a guide took longer than allowed.

    Attributes:
        seconds: the limit that was passed.
    """

    def __init__(self, message: str = "", *, seconds: float | None = None) -> None:
        super().__init__(message)
        self.seconds = seconds


class VocabularyError(GuidedDecodingError, ValueError):
    """Tokenizer and model cannot be reconciled, or the tokenizer cannot be read."""


class BackendNotInstalledError(GuidedDecodingError, ImportError):
    """A grammar engine is missing or too old; the message names the pip command."""


class MatcherError(GuidedDecodingError):
    """An engine failed while it was matching one request: that request cannot go on, others can."""


class DeadEndError(GuidedDecodingError):
    """No token is legal and the guide is not complete.

    Attributes:
        row: row of the batch, if known.
        num_tokens: tokens generated before the dead end.
        text: the text so far.
    """

    def __init__(
        self, message: str = "", *, row: int | None = None, num_tokens: int | None = None, text: str | None = None
    ) -> None:
        super().__init__(message)
        self.row = row
        self.num_tokens = num_tokens
        self.text = text


class TokenRejectedError(GuidedDecodingError):
    """A token that had to be accepted was refused by the guide.

    Attributes:
        row: row of the batch, in `transformers`.
        request_id: the request, in engines.
        token_id: the refused token.
        num_tokens: tokens accepted before it.
    """

    def __init__(
        self,
        message: str = "",
        *,
        row: int | None = None,
        request_id: object = None,
        token_id: int | None = None,
        num_tokens: int | None = None,
    ) -> None:
        super().__init__(message)
        self.row = row
        self.request_id = request_id
        self.token_id = token_id
        self.num_tokens = num_tokens


class RollbackError(GuidedDecodingError, ValueError):
    """A rollback over more tokens than have been accepted, or over a negative number."""
