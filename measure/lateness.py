"""Lag |arrival − schedule|, ms, of requests that no concurrency limit queued, and the limit of trusted latencies."""

LATE_MS = 5.0
LATE_SHARE_OF_TTFT = 0.01


def late_limit_ms(ttft_p50_ms: float | None) -> float:
    """Return the most lag, in ms, of a request that is not late. Null: no first token came."""
    return max(LATE_MS, LATE_SHARE_OF_TTFT * (ttft_p50_ms or 0.0))
