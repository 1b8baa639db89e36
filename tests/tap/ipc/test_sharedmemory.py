"""Shared memory about upstreams: what one worker writes, the others and its successor read."""

from tap.ipc.sharedmemory import BoardSize, UpstreamBoard

SIZE = BoardSize(workers=2, slots=3, keys=8)


def test_a_key_replaces_the_one_of_its_cell_and_no_other() -> None:
    prefix_table = UpstreamBoard(size=SIZE).prefix_table(0)
    prefix_table.add([1, 2])
    prefix_table.add([1 + 8])  # a table of 8 cells
    assert (prefix_table.overlap([1]), prefix_table.overlap([9]), prefix_table.overlap([2])) == (0, 1, 1)


def test_another_key_in_the_cell_of_a_prefix_does_not_hide_the_keys_behind_it() -> None:
    prefix_table = UpstreamBoard(size=SIZE).prefix_table(0)
    prefix_table.add([1, 2, 3])
    prefix_table.add([2 + 8])
    assert prefix_table.overlap([1, 2, 3, 4]) == 3
