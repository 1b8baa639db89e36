"""The benchmark runs, and finds nothing lost; what it measures is not judged here."""

from tests.warmstart import run_warm


def test_benchmark_records_everything() -> None:
    done = run_warm("scripts.bench_tap", "--quick")
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in done.stdout.splitlines()]
    headings, figures = rows[0], {row[0]: row for row in rows[2:]}
    assert figures, done.stderr
    tap = {label: row[headings.index("tap")] for label, row in figures.items() if len(row) == len(headings)}
    assert tap["requests not recorded, all runs"] == "0"
    assert tap["failed streams and lost chunks, all runs"] == "0"
    assert {"CPU µs per chunk, 25.6k chunks/s", "added chunk p99 µs", "added TTFT µs, solo"} <= set(tap)
    # 512 and 128 streams, then 60 requests and 5 to warm up, of either size.
    assert "tap: offered 770, recorded 770, dropped 0" in done.stdout
