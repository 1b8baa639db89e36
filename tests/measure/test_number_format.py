"""Numbers as pages and terminals say them."""

from measure import number_format


def test_counts_and_rates() -> None:
    assert [number_format.count(value) for value in (0, 1_234, 99_999, 123_456, 1_050_000)] == [
        "0",
        "1,234",
        "99,999",
        "123k",
        "1.05M",
    ]
    rates = [number_format.rate(value) for value in (0.0, 0.42, 12.0, 999.4, 999.5, 1_234.0)]
    assert rates == ["0", "0.4", "12", "999.4", "1.00k", "1.23k"]
    assert number_format.compact(999.6) == "1.00k"


def test_shares_never_round_to_100_percent() -> None:
    assert number_format.share_of(1, 3) == "33.3 %"
    assert number_format.share_of(5, 5) == "100 %"
    assert number_format.share_of(99_999, 100_000) == "99.9 %"
    assert number_format.share_of(0, 0) == "–"


def test_times_and_sizes() -> None:
    assert [number_format.duration(value) for value in (0.014, 1.2, 37.4, 1_250.0)] == [
        "14 µs",
        "1.2 ms",
        "37 ms",
        "1.25 s",
    ]
    assert [number_format.duration(value) for value in (599e3, 1_050e3, 3.22e8, 9e9)] == [
        "599 s",
        "17.5 min",
        "89.4 h",
        "2,500 h",
    ]
    assert [number_format.size(value) for value in (0, 1_536, 256 << 20)] == ["0 B", "1.50 KiB", "256 MiB"]
