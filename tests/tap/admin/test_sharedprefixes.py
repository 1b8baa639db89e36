"""Which prefixes are told as shared, how often, and what is forgotten."""

from tap.admin.cachecurve import CacheCurve
from tap.admin.state import SharedPrefix, SharedPrefixes


class Traffic:
    """Requests through the curve, which knows what was seen before, into the prefixes; as the admin process does."""

    def __init__(self, capacity: int = 100) -> None:
        self.curve = CacheCurve(4)
        self.prefixes = SharedPrefixes(capacity)

    def send(self, *blocks: int, now_s: float = 0.0, opening: bool = True) -> None:
        seen = self.curve.take(blocks, 4 * len(blocks), None, now_s)
        self.prefixes.take(blocks, seen, now_s, opening=opening)

    def top(self, now_s: float = 0.0) -> list[SharedPrefix]:
        return self.prefixes.top(now_s)


def test_a_long_prefix_is_one_line_however_many_blocks_it_has() -> None:
    traffic = Traffic()
    system = range(1, 501)
    for tail in range(10):
        traffic.send(*system, 1_000 + tail)
    assert traffic.top() == [SharedPrefix(hash=500, blocks=500, requests=10)]


def test_branches_below_a_prefix_are_told_beside_it_until_they_are_nearly_all_of_it() -> None:
    traffic = Traffic()
    for tail in range(6):
        traffic.send(1, 2, 3, 10, 11, 100 + tail)
    for tail in range(6):
        traffic.send(1, 2, 3, 20, 200 + tail)
    # Twelve shared 3 blocks, of which the first six were seen only in the longer one, which was found first.
    assert traffic.top() == [
        SharedPrefix(hash=11, blocks=5, requests=6),
        SharedPrefix(hash=20, blocks=4, requests=6),
        SharedPrefix(hash=3, blocks=3, requests=7),
    ]
    for tail in range(60):
        traffic.send(1, 2, 3, 20, 300 + tail)
    assert [prefix.hash for prefix in traffic.top()] == [20, 11]  # 66 of 67 go on: the longer one says it all


def test_what_nobody_shares_is_not_told() -> None:
    traffic = Traffic()
    traffic.send(1, 2)
    traffic.send(3, 4)
    traffic.send()
    assert traffic.top() == []
    assert len(traffic.prefixes) == 0


def test_a_conversations_own_past_is_not_shared() -> None:
    traffic = Traffic()
    for turn in range(1, 6):
        traffic.send(1, 2, *range(10, 10 + 3 * turn), opening=turn == 1)
    assert traffic.top() == []
    traffic.send(1, 2, 99)  # another one begins as it did; of the first one's turns those before are not known
    assert traffic.top() == [SharedPrefix(hash=2, blocks=2, requests=2)]


def test_memory_is_bounded_and_what_recurs_is_kept() -> None:
    traffic = Traffic(capacity=10)
    for session in range(100):
        traffic.send(1, 2, 1_000 + session)
        traffic.send(
            1, 2, 1_000 + session, 5_000 + session, opening=False
        )  # its own second turn: a point that nobody passes again
    assert len(traffic.prefixes) == 10
    # The first session parted from nobody at block 2; the second showed the point, and one before it had it too.
    assert traffic.top()[0] == SharedPrefix(hash=2, blocks=2, requests=199)


def test_old_minutes_are_forgotten() -> None:
    traffic = Traffic()
    for minute in range(4):
        traffic.send(1, 2, 10 + minute, now_s=60.0 * minute)
    assert traffic.top(now_s=180.0)[0].requests == 4
    assert traffic.top(now_s=60.0 * 16)[0].requests == 2
    assert traffic.top(now_s=60.0 * 17) == []  # one request is no sharing
