"""Lines of long work in a log."""

from types import SimpleNamespace

import pytest

from tracefile.commandline import progress
from tracefile.commandline.progress import counted


@pytest.mark.parametrize(
    ("number", "each_s", "message"),
    [
        (1, 112.0, ["all 1 in 1:52"]),
        (3, 45.0, ["1 of 3 · 1:30 left", "2 of 3 · 0:45 left", "all 3 in 2:15"]),
        (4, 9.0, ["2 of 4 · 0:18 left", "all 4 in 0:36"]),
        (9, 1.0, []),
    ],
)
def test_log_has_a_progress_line_every_ten_seconds(
    number: int, each_s: float, message: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now_s = 0.0
    monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=lambda: now_s))
    for _ in counted(range(number), "steps rebuilt"):
        now_s += each_s
    assert capsys.readouterr().err.splitlines() == [f"steps rebuilt: {line}" for line in message]
