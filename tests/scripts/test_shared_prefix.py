"""What a step takes while all answers run, read out of a trace."""

from pathlib import Path

import pytest

from scripts.shared_prefix import step_ms, table
from tracefile import Meta, Record, RequestId, TraceWriter


def trace(path: Path, *answers: tuple[float, list[float]]) -> Path:
    """Answers by when their first token came and the gaps after it."""
    with TraceWriter(path, Meta(source="client")) as writer:
        for number, (first_ms, gaps_ms) in enumerate(answers):
            writer.write(
                Record(
                    request_id=RequestId(f"r{number}"),
                    arrival_ms=float(number),
                    ttft_ms=first_ms - number,
                    itl_ms=gaps_ms,
                    itl_tokens=[1] * len(gaps_ms),
                    output_tokens=len(gaps_ms) + 1,
                )
            )
    return path


def test_only_gaps_while_every_answer_runs_are_counted(tmp_path: Path) -> None:
    # From 200 on both run, until 290: steps of 30. Before and after, one of them is alone: 5 and 7.
    first = (100.0, [5.0] * 20 + [30.0] * 3)
    second = (200.0, [30.0] * 3 + [7.0] * 50)
    assert step_ms(trace(tmp_path / "t.jsonl", first, second)) == 30.0


def test_answers_that_never_meet_are_refused(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"t\.jsonl: the first answer ended .* expected more --output-tokens"):
        step_ms(trace(tmp_path / "t.jsonl", (100.0, [5.0]), (200.0, [5.0])))


def test_the_table_has_the_ratio() -> None:
    assert table([(8, 20.0, 25.0)]).splitlines()[2] == "| 8 | 20.0 | 25.0 | 0.80 |"
