"""A table's lines, literally."""

import pytest

from measure.table import table_lines


def test_columns_are_as_wide_as_their_widest_cell() -> None:
    rows = [["all", "1,234", "94.0"], ["turns 2+", "7", "3,446"]]
    assert table_lines(["cohort", "n", "p50 ms"], rows, "<") == [
        "cohort        n  p50 ms",
        "all       1,234    94.0",
        "turns 2+      7   3,446",
    ]


def test_no_line_ends_in_blanks_and_headings_may_be_left_out() -> None:
    assert table_lines([], [["a", "long"], ["bb", ""]], "<<", gap=" ") == ["a  long", "bb"]
    assert table_lines([], []) == []


def test_a_row_of_another_length_is_refused() -> None:
    with pytest.raises(ValueError, match="argument"):
        table_lines(["a", "b"], [["1"]])
