"""Work on leftovers of a core: the class of thread that does each step."""

import os
import threading
from collections.abc import Iterator, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tap.recorder.leftovers import do_all

needs_classes = pytest.mark.skipif(not hasattr(os, "SCHED_IDLE"), reason="the system has no classes of threads")


def steps(said: Sequence[bool], seen: list[tuple[bool, int]]) -> Iterator[bool]:
    for behind in said:
        seen.append((threading.current_thread() is threading.main_thread(), os.sched_getscheduler(0)))
        yield behind


@needs_classes
def test_a_step_after_one_that_was_behind_is_done_by_the_thread_that_was_there_before() -> None:
    seen: list[tuple[bool, int]] = []
    do_all(steps([False, True, True, False, False], seen))
    idle, usual = (False, os.SCHED_IDLE), (True, os.sched_getscheduler(0))
    assert seen == [idle, idle, usual, usual, idle]


@needs_classes
@given(st.lists(st.booleans(), max_size=12))
def test_each_step_is_done_once_by_the_thread_that_the_one_before_it_asked_for(said: list[bool]) -> None:
    seen: list[tuple[bool, int]] = []
    do_all(steps(said, seen))
    assert [main for main, _ in seen] == [False, *said][: len(said)]


def test_a_step_that_fails_ends_it_with_its_error() -> None:
    def fail() -> Iterator[bool]:
        yield False
        raise ValueError("as it was")

    with pytest.raises(ValueError, match="as it was"):
        do_all(fail())
