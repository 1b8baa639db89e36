"""docs/python.md: its blocks run in order, and print what stands below them; ``import kvtape`` stays light."""

import contextlib
import io
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

import kvtape
from kvtape.runs import flag_words, run_json
from tracefile.files.reading import load_trace

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "python.md").read_text()
CAPTURE = ROOT / "data" / "captures" / "256x4" / "session-slow.jsonl.zst"
BLOCKS = re.findall(r"^```python\n(.*?)^```\n(?:\n```\n(.*?)^```\n)?", PAGE, re.MULTILINE | re.DOTALL)
QUERIES = re.findall(r"^```sql\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "data").symlink_to(ROOT / "data")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_python_page_runs(folder: Path, sim_server: str) -> None:
    names: dict[str, Any] = {}
    for code, expected in BLOCKS:
        reported = io.StringIO()
        with contextlib.redirect_stdout(reported):
            exec(compile(code.replace("http://127.0.0.1:8000", sim_server), "docs/python.md", "exec"), names)
        assert not expected or reported.getvalue() == expected
    assert [row.kind for row in names["grid"].points] == ["measured", "capture", "scenario", "scenario"]
    # A run's own ending has the same numbers, but for the cache's size, which takes a compiler to count.
    again = kvtape.measure_trace("load.jsonl.zst")
    assert names["load"].metrics == msgspec.structs.replace(again, cache=None)
    assert (folder / "survival.html").stat().st_size > 10_000


def test_duckdb_query_runs(folder: Path) -> None:
    duckdb = pytest.importorskip("duckdb")
    (folder / "captured.jsonl.zst").symlink_to(CAPTURE)
    by_turn = duckdb.sql(QUERIES[0]).fetchall()
    _, records = load_trace(CAPTURE)
    firsts = [record for record in records if record.turn == 1]
    waits = sorted(record.ttft_ms or 0.0 for record in firsts)
    hits, prompts = (sum(getattr(item, name) for item in firsts) for name in ("cached_tokens", "prompt_tokens"))
    assert by_turn[0] == (1, len(firsts), hits / prompts, waits[-(-9 * len(waits) // 10) - 1])


@pytest.mark.parametrize("library", ["pandas", "polars"])
def test_data_frame_has_a_row_per_request(library: Any) -> None:
    pytest.importorskip(library)
    frame, run = kvtape.read_frame(CAPTURE, library), kvtape.read_run(CAPTURE)
    assert list(frame["request_id"]) == run.request_ids
    assert list(frame["cached_tokens"]) == run.cached_tokens.tolist()
    assert set(frame["status"]) == {"ok"}


def test_import_is_light_and_complete() -> None:
    heavy = ("numpy", "scipy", "plotly", "numba", "msgspec", "measure", "loadgen", "sim", "report")
    code = f"import kvtape, sys; print([name for name in {heavy} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout == "[]\n"
    assert sorted(" ".join(kvtape._MODULES.values()).split()) == kvtape.__all__ == dir(kvtape)
    assert all(getattr(kvtape, name).__name__ == name for name in kvtape.__all__)
    with pytest.raises(AttributeError, match="no attribute 'run_loads'; expected one of InputError"):
        kvtape.run_loads  # noqa: B018 - the lookup is the test


def test_keywords_are_flags() -> None:
    flags: dict[str, Any] = {"group_size": 8, "cold_prompts": True, "json": False, "model": None}
    words = flag_words({**flags, "slo": ["a<=1", "b<=2"], "rate": 0.5, "output": Path("a b.jsonl")})
    assert words == [
        *("--group-size=8", "--cold-prompts", "--slo=a<=1", "--slo=b<=2"),
        *("--rate=0.5", "--output=a b.jsonl"),
    ]


def test_python_errors_equal_command_errors(tmp_path: Path) -> None:
    with pytest.raises(kvtape.InputError, match=r"^--paralel: .*did you mean --parallel\?"):
        kvtape.run_load("http://127.0.0.1:1", tmp_path / "t.jsonl", paralel=8)
    with pytest.raises(kvtape.InputError, match="num_gpu_block: not an engine setting; expected num_gpu_blocks"):
        kvtape.forecast(CAPTURE, "model.json", [kvtape.Scenario({"num_gpu_block": 600})])
    with pytest.raises(kvtape.InputError, match="bootstrap: -1; expected 0 or more"):
        kvtape.fit_model([CAPTURE], "model.json", bootstrap=-1)


class Interrupted:
    """A process during which Ctrl-C comes once."""

    returncode = 130

    def __init__(self, *_: Any, **__: Any) -> None:
        self.signals: list[int] = []
        Interrupted.last = self

    last: "Interrupted"

    def communicate(self) -> tuple[bytes, bytes]:
        if not self.signals:
            raise KeyboardInterrupt
        self.signals.append(0)
        return b"", b""

    def send_signal(self, number: int) -> None:
        self.signals.append(number)


def test_ctrl_c_completes_the_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvtape.runs.subprocess.Popen", Interrupted)
    with pytest.raises(KeyboardInterrupt):
        run_json("loadgen", [])
    assert Interrupted.last.signals == [signal.SIGINT, 0]  # then waited for
