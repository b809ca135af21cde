"""Warnings that point at the line of the program that called `generate`.

In:  a message, any number of calls below that line.      Out: a UserWarning there, whatever lies between.
"""

import os
import sys
import warnings
from types import FrameType
from typing import Final

import torch
import transformers

__all__ = ["warn_user"]

# how many of their frames lie between is another number in each version and mode
_LIBRARIES: Final = tuple(
    os.path.join(os.path.dirname(os.path.abspath(file)), "")
    for file in (os.path.dirname(__file__), transformers.__file__ or "", torch.__file__)
)


def warn_user(message: str) -> None:
    """Warn at the innermost frame that is none of the libraries', or at the outermost frame there is."""
    level = 1
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_back is not None and frame.f_code.co_filename.startswith(_LIBRARIES):
        frame, level = frame.f_back, level + 1
    # skip_file_prefixes does this from Python 3.12 on
    warnings.warn(message, UserWarning, stacklevel=level)
