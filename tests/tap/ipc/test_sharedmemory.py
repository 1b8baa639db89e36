"""Shared memory of upstreams: load and prefix tables, shared by workers."""

from tap.ipc.sharedmemory import BoardSize, UpstreamBoard

SIZE = BoardSize(workers=2, slots=3, keys=8)


def test_a_key_evicts_only_the_key_of_its_cell() -> None:
    prefix_table = UpstreamBoard(size=SIZE).prefix_table(0)
    prefix_table.add([1, 2])
    prefix_table.add([1 + 8])  # a table of 8 cells
    assert (prefix_table.overlap([1]), prefix_table.overlap([9]), prefix_table.overlap([2])) == (0, 1, 1)


def test_evicted_key_does_not_hide_a_longer_prefix_hit() -> None:
    prefix_table = UpstreamBoard(size=SIZE).prefix_table(0)
    prefix_table.add([1, 2, 3])
    prefix_table.add([2 + 8])
    assert prefix_table.overlap([1, 2, 3, 4]) == 3
