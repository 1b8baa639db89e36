"""The free queue: a ring of copies of segments through ``before`` and ``after``, for whichever pool they are of."""

from typing import Any

from sim.kernels.compiling import kernel


@kernel
def link_after(copies: Any, before: int, copy: int) -> None:
    """Put ``copy`` into the ring, behind ``before``."""
    after = copies[before].after
    copies[before].after = copy
    copies[copy].before = before
    copies[copy].after = after
    copies[after].before = copy


@kernel
def unlink(copies: Any, copy: int) -> None:
    """Take ``copy`` out of the ring."""
    before, after = copies[copy].before, copies[copy].after
    copies[before].after = after
    copies[after].before = before
