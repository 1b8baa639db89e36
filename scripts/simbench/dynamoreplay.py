"""Replay by Dynamo's ``run_trace_replay``, for a Python with ``ai-dynamo``; JSON on stdout.

    VENV/bin/python dynamoreplay.py TRACE '{"num_gpu_blocks": …}' '{"num_workers": 4, "router_mode": "kv_router"}'

The last object has more arguments of ``run_trace_replay``, such as ``replay_concurrency``; by default, one engine and
the arrivals of the trace. Needs ``pip install --no-deps ai-dynamo ai-dynamo-runtime`` and
``pip install typing_extensions``.
"""

import json
import resource
import sys
from time import perf_counter, process_time

from dynamo.replay import run_trace_replay


def main() -> None:
    """Replay once and print times and prefix hits."""
    trace, engine, options = sys.argv[1], json.loads(sys.argv[2]), json.loads(sys.argv[3])
    wall, cpu = perf_counter(), process_time()
    report = run_trace_replay(
        trace,
        extra_engine_args={"engine": engine},
        trace_block_size=engine["block_size"],
        capture_per_request=True,
        **options,
    )
    figures = {
        "wall_s": round(perf_counter() - wall, 3),
        "cpu_s": round(process_time() - cpu, 3),
        "dynamo_wall_s": round(report.summary["wall_time_ms"] / 1000, 3),
        "rss_mib": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024),
        "hit_tokens": sum(request["reused_input_tokens"] for request in report.per_request),
        "mean_ttft_ms": round(report.summary["mean_ttft_ms"], 3),
        "requests": report.summary["completed_requests"],
    }
    json.dump(figures, sys.stdout)


if __name__ == "__main__":
    main()
