"""Simulation of synthetic traffic, written to a trace."""

import resource
import sys
import tempfile
from pathlib import Path
from time import perf_counter, process_time

import numpy as np

from scripts.simbench.timing import Figures, measure_command
from sim.engine.results import finished_records
from sim.engine.run import run_engine, summarise, written
from sim.latency.modelfile import Model
from sim.workload.arrivals import Arrivals, plan_arrivals
from tracefile.files.writing import TraceWriter
from tracefile.records.decoding import RecordColumns
from tracefile.records.schema import Meta

PROMPT_TOKENS = 10_000
SESSIONS = 2_000
SPACING_MS = 400.0


def bench_million(requests: int, model: Model) -> Figures:
    """Run ``requests`` of 10,000 prompt tokens and 20 to 180 output tokens, write every record, render the page.

    Each prompt begins with a random prefix of one of 2,000 prompts, so there are prefix hits and evictions. The time to
    generate the requests is reported separately.
    """
    block_size, start_cpu = model.engine.block_size, process_time()
    arrivals, wall, cpu = synthetic_arrivals(requests, block_size), perf_counter(), process_time()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "predicted.jsonl"
        run = run_engine(arrivals, model.engine, model, 0)
        records = finished_records(run.results, block_size)
        with TraceWriter(path, Meta(source="sim", block_size=block_size)) as writer:
            summary = summarise(written(records, writer), run.preemptions, run.steps)
        ran, ran_cpu = perf_counter(), process_time()
        size, shown = path.stat().st_size, show(path)
    return {
        "million_requests": summary.requests,
        "million_prompt_tokens": summary.prompt_tokens,
        "million_hit_tokens": summary.cached_tokens,
        "million_steps": summary.steps,
        "million_wall_s": round(ran - wall, 2),
        "million_cpu_s": round(ran_cpu - cpu, 2),
        "million_making_cpu_s": round(cpu - start_cpu, 2),
        "million_written_mib": round(size / 2**20),
        "million_rss_mib": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024),
        **shown,
    }


def show(trace: Path) -> Figures:
    """Measure ``report show --html`` as a command."""
    page = trace.with_suffix(".html")
    command = [sys.executable, "-m", "report", "show", str(trace), "--html", str(page)]
    return {**measure_command("million_show", 0, command), "million_page_kb": round(page.stat().st_size / 1000)}


def synthetic_arrivals(requests: int, block_size: int) -> Arrivals:
    """Return random requests (arrivals, tokens, block hashes), in the columns of a trace."""
    rng, blocks = np.random.default_rng(1), PROMPT_TOKENS // block_size
    shares = zip(rng.integers(0, SESSIONS, requests).tolist(), rng.integers(0, blocks, requests).tolist(), strict=True)
    columns = {
        "request_id": [f"r{number}" for number in range(requests)],
        "arrival_ms": np.cumsum(rng.exponential(SPACING_MS, requests)).tolist(),
        "prompt_tokens": [PROMPT_TOKENS] * requests,
        "block_hashes": [_chain(blocks, number, *share) for number, share in enumerate(shares)],
        "output_tokens": rng.integers(20, 180, requests).tolist(),
    }
    return plan_arrivals(Meta(block_size=block_size), RecordColumns(columns), block_size)


def _chain(blocks: int, number: int, session: int, shared: int) -> list[int]:
    """Return the blocks of a prompt; the first ``shared`` are those of a session."""
    fresh = (number + 1) << 32
    return [*range(session << 16, (session << 16) + shared), *range(fresh, fresh + blocks - shared)]
