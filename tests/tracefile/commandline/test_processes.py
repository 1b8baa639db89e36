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
    outcome = dict(results(Square(100), range(9), procs=procs))
    assert outcome == {number: number * number for number in range(9)}


def test_dead_worker_process_is_a_one_line_error() -> None:
    with pytest.raises(InputError, match="a worker process died"):
        list(results(Square(5), range(9), procs=2))


def test_interrupt_keeps_results_and_stops_all_processes() -> None:
    coming: Any = results(Square(100), range(50), procs=2)
    task, result = next(coming)
    assert result == task * task
    coming.close()
    assert not active_children()
