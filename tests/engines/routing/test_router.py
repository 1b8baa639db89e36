"""The router's account: requests sent and not ended, prefill outstanding, engines out of service."""

from collections.abc import Sequence

from engines.routing import RoutedEngine, RoutedRequest, Router
from engines.routing.load import round_robin
from engines.routing.prefix import PrefixIndex

NAMES = ["http://a", "http://b"]


def request(number: int, blocks: int = 10) -> RoutedRequest:
    return RoutedRequest(number, float(number), None, list(range(blocks)), 16, 165)


def state(engine: RoutedEngine) -> tuple[int, float, float]:
    return engine.requests, engine.prefill_tokens, engine.in_flight_tokens


def test_load_counts_requests_in_flight() -> None:
    router = Router(NAMES, round_robin)
    first = request(0)
    assert router.choose(first) == 0
    assert state(router.engines[0]) == (0, 0.0, 0.0)
    router.sent(first, 0)
    assert state(router.engines[0]) == (1, 165.0, 165.0)
    router.first_token(0)
    assert state(router.engines[0]) == (1, 0.0, 165.0)
    router.ended(0, 9.0)
    router.ended(0, 9.0)
    router.first_token(0)
    assert state(router.engines[0]) == (0, 0.0, 0.0)
    # Ended before its first token: aborted, or refused.
    router.sent(request(1), 1)
    router.ended(1, 9.0)
    assert state(router.engines[1]) == (0, 0.0, 0.0)
    router.check_integrity()


def test_blocks_sent_before_need_no_prefill() -> None:
    router = Router(NAMES, round_robin, knowledge=PrefixIndex(2, capacity_blocks=100))
    router.sent(request(0, blocks=6), 0)
    router.choose(request(2))
    assert [engine.overlap for engine in router.engines] == [6, 0]
    router.sent(request(2), 0)
    assert state(router.engines[0]) == (2, 165.0 + 165 - 6 * 16, 330.0)
    router.lost_cache(0)
    router.choose(request(3))
    assert [engine.overlap for engine in router.engines] == [0, 0]


def test_policies_see_healthy_engines_or_all_if_none_is_healthy() -> None:
    seen: list[list[int]] = []

    def last(_: RoutedRequest, engines: object) -> int:
        assert isinstance(engines, list)
        seen.append([engine.index for engine in engines])
        return len(engines) - 1

    router = Router([*NAMES, "http://c"], last)
    router.set_healthy(1, False)
    assert router.choose(request(0)) == 2
    router.set_healthy(2, False)
    assert router.choose(request(1)) == 0
    router.set_healthy(0, False)
    assert router.choose(request(2)) == 2
    router.set_healthy(1, True)
    assert router.choose(request(3)) == 1
    assert seen == [[0, 2], [0], [0, 1, 2], [1]]


def test_a_learner_is_notified_of_dispatch_and_end() -> None:
    class Learning:
        def __init__(self) -> None:
            self.reported: list[tuple[str, int, int]] = []

        def __call__(self, _: RoutedRequest, engines: Sequence[RoutedEngine]) -> int:
            return len(engines) - 1

        def sent(self, request: RoutedRequest, engine: RoutedEngine) -> None:
            self.reported.append(("sent", request.number, engine.index))

        def ended(self, request: RoutedRequest, engine: RoutedEngine, now_s: float) -> None:
            self.reported.append((f"ended at {now_s:g}", request.number, engine.index))

    policy = Learning()
    router = Router(NAMES, policy)
    # The chosen engine was unreachable: the request was sent to the second engine.
    assert router.choose(request(4)) == 1
    router.sent(request(4), 0)
    router.ended(4, 7.5)
    router.ended(4, 8.5)
    assert policy.reported == [("sent", 4, 0), ("ended at 7.5", 4, 0)]
