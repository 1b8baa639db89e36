"""Work on other processes: every result comes back, also where one of them dies."""

import os
from multiprocessing import active_children
from typing import Any

import pytest

from tracefile.commandline.processes import results
from tracefile.records.errors import InputError


class Square:
    """Work with a part of its own, which travels once."""

    def __init__(self, most: int) -> None:
        self._most = most

    def __call__(self, number: int) -> int:
        if number == self._most:
            os._exit(9)
        return number * number


@pytest.mark.parametrize("procs", [1, 2])
def test_every_task_has_its_result(procs: int) -> None:
    found = dict(results(Square(100), range(9), procs=procs))
    assert found == {number: number * number for number in range(9)}


def test_a_process_that_dies_is_said_in_a_line() -> None:
    with pytest.raises(InputError, match="a worker process died"):
        list(results(Square(5), range(9), procs=2))


def test_what_was_done_before_an_interrupt_is_there_and_nothing_is_left_running() -> None:
    coming: Any = results(Square(100), range(50), procs=2)
    task, result = next(coming)
    assert result == task * task
    coming.close()
    assert not active_children()
