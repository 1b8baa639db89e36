"""Arguments of machine code as a table of words: a call costs the same however many arrays there are.

An array is three words (address, length, width); a named tuple, its fields; a number, one word. Kinds say how to read
them: an array's dtype, dimensions and flags, a named tuple's class and kinds, a number's type.
"""

import ctypes
import struct
from typing import Any, Final

import numpy as np

CONTIGUOUS, ALIGNED, WRITEABLE = 0x1, 0x100, 0x400
"""Flags of arrays, numpy's."""
ARRAY_WORDS: Final = 3
NO_WORDS: Final = (0, 0)
"""Words before those of the arguments: the result, and the address of an exception's description."""
_MOST_DIMENSIONS = 2
_FLAGS = ALIGNED | WRITEABLE
_DATA: Final = object.__basicsize__
"""Where an array's object holds the address of its data: first, by numpy's C interface. Asking numpy takes ten times as
long as all the rest."""
_OF_PYTHON: Final = {float: float, np.float64: float, np.int64: int, np.bool_: bool}
"""Numbers of one kind, with code in common."""
_word_at = ctypes.c_int64.from_address


def add_argument(one: Any, kinds: list[Any], words: list[int]) -> None:
    """Add an argument's kind and words. Raises TypeError for an array that is not contiguous, and for other objects."""
    kind = type(one)
    if kind is np.ndarray:
        flags, shape = one.flags.num, one.shape
        if not flags & CONTIGUOUS or not 0 < len(shape) <= _MOST_DIMENSIONS:
            raise TypeError(
                f"array of shape {shape}, strides {one.strides}; expected a contiguous one of 1 or 2 dimensions"
            )
        kinds.append((one.dtype, len(shape), flags & _FLAGS))
        words += (_word_at(id(one) + _DATA).value, shape[0], shape[1] if len(shape) > 1 else 1)
    elif kind is int or kind is bool:
        kinds.append(kind)
        words.append(one)
    elif isinstance(one, tuple):
        parts: list[Any] = []
        for part in one:
            add_argument(part, parts, words)
        kinds.append((kind, tuple(parts)))
    else:
        _add_number(one, kinds, words)


def _add_number(one: Any, kinds: list[Any], words: list[int]) -> None:
    if type(one) in _OF_PYTHON:
        kinds.append(_OF_PYTHON[type(one)])
    elif isinstance(one, np.integer):
        kinds.append(one.dtype)
    else:
        raise TypeError(f"{type(one).__name__}; expected an array, a named tuple or a number")
    packed = struct.pack("d", one) if isinstance(one, float) else struct.pack("Q", int(one) % (1 << 64))
    words.append(struct.unpack("q", packed)[0])
