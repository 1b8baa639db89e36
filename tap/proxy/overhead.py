"""What the tap adds to responses, measured on a sample of them, so that the others pay nothing for it."""

from measure.histogram import OVERHEAD_S, HistogramCounts, add_value, empty_counts


class Overhead:
    """Times of one worker since it started."""

    __slots__ = ("chunks", "response_heads")

    def __init__(self) -> None:
        self.response_heads: HistogramCounts = empty_counts(OVERHEAD_S)
        self.chunks: HistogramCounts = empty_counts(OVERHEAD_S)

    def response_head(self, taken_ns: int) -> None:
        """Count the time that one response's head took."""
        add_value(self.response_heads, OVERHEAD_S, taken_ns / 1e9)

    def chunk(self, taken_ns: int) -> None:
        """Count the time from one read of a response body to its being written on."""
        add_value(self.chunks, OVERHEAD_S, taken_ns / 1e9)
