"""A Ctrl-C in the middle of forecasts."""

from collections.abc import Callable
from typing import ParamSpec, TypeVar

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")


def interrupted_at(number: int, called: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """``called``, whose call of this number is interrupted."""
    calls = 0

    def call(*arguments: Parameters.args, **options: Parameters.kwargs) -> Result:
        nonlocal calls
        calls += 1
        if calls == number:
            raise KeyboardInterrupt
        return called(*arguments, **options)

    return call
