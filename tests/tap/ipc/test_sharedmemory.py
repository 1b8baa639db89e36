"""Shared memory about upstreams: what one worker writes, the others and its successor read."""

from pathlib import Path

from tap.ipc.sharedmemory import HELD_TOKENS, LOAD_CELLS, PREFILL_TOKENS, REQUESTS, BoardSize, UpstreamBoard

SIZE = BoardSize(workers=2, slots=3, keys=8)


def test_counts_are_summed_over_workers_and_those_of_a_dead_one_go(tmp_path: Path) -> None:
    first, second, supervisor = (UpstreamBoard(str(tmp_path), SIZE) for _ in range(3))
    row = first.row(0)
    row[1 * LOAD_CELLS + REQUESTS], row[1 * LOAD_CELLS + PREFILL_TOKENS], row[1 * LOAD_CELLS + HELD_TOKENS] = (
        2,
        300,
        500,
    )
    second.row(1)[1 * LOAD_CELLS + REQUESTS] = 1
    assert supervisor.totals(1) == [3, 300, 500]
    assert supervisor.totals(0) == supervisor.totals(2) == [0, 0, 0]
    supervisor.forget_worker(0)
    assert second.totals(1) == [1, 0, 0]


def test_a_workers_keys_are_there_for_its_successor(tmp_path: Path) -> None:
    UpstreamBoard(str(tmp_path), SIZE).table(2).add([11, 12, 13])
    successor = UpstreamBoard(str(tmp_path), SIZE)
    assert successor.table(2).overlap([11, 12, 14, 15]) == 2
    assert successor.table(2).overlap([11, 12, 13]) == 3
    assert successor.table(1).overlap([11]) == 0
    successor.table(2).clear()
    assert successor.table(2).overlap([11]) == 0


def test_a_key_replaces_the_one_of_its_cell_and_no_other() -> None:
    table = UpstreamBoard(size=SIZE).table(0)
    table.add([1, 2])
    table.add([1 + 8])  # a table of 8 cells
    assert (table.overlap([1]), table.overlap([9]), table.overlap([2])) == (0, 1, 1)


def test_another_key_in_the_cell_of_a_prefix_does_not_hide_the_keys_behind_it() -> None:
    table = UpstreamBoard(size=SIZE).table(0)
    table.add([1, 2, 3])
    table.add([2 + 8])
    assert table.overlap([1, 2, 3, 4]) == 3
