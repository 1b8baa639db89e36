"""When a client was too late for its latencies to be trusted: one rule, for whoever sends and whoever reads a trace."""

LATE_MS = 5.0
LATE_SHARE_OF_TTFT = 0.01


def late_limit_ms(ttft_p50_ms: float | None) -> float:
    """How much lag (arrival − schedule) a client may have: a request with more is late, a run whose p99 has more too.

    Null: no first token came.
    """
    return max(LATE_MS, LATE_SHARE_OF_TTFT * (ttft_p50_ms or 0.0))
