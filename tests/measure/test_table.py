"""A table's lines, literally."""

from measure.table import table_lines


def test_columns_are_as_wide_as_their_widest_cell() -> None:
    rows = [["all", "1,234", "94.0"], ["turns 2+", "7", "3,446"]]
    assert table_lines(["cohort", "n", "p50 ms"], rows, "<") == [
        "cohort        n  p50 ms",
        "all       1,234    94.0",
        "turns 2+      7   3,446",
    ]
