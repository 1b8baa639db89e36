"""CPU time of a routing decision and of its account, for each policy at several fleet sizes: µs per request."""

import argparse
from collections.abc import Callable, Sequence
from time import thread_time_ns

from engines.routing import POLICIES, RoutedRequest, make_router, parse_route
from engines.routing.records import RoutingCosts

SIZES = (2, 8, 64)
BLOCK_TOKENS = 512
COSTS = RoutingCosts(per_prefill_token_ms=0.05, per_attention_token2_ms=1e-6, t0_ms=5.0, per_decode_ms=0.1)
IN_FLIGHT = 4
"""Requests in flight for each engine."""


def requests(count: int, blocks: int) -> list[RoutedRequest]:
    """Turns of ``count`` / 10 sessions side by side, each prompt one block longer than the last."""
    sessions = count // 10
    made = []
    for number in range(count):
        session, turn = number % sessions, number // sessions
        keys = [session * 10**6 + place for place in range(blocks + turn)]
        made.append(
            RoutedRequest(number, number * 0.01, b"s%d" % session, keys, BLOCK_TOKENS, BLOCK_TOKENS * len(keys) + 100)
        )
    return made


def measure(name: str, engines: int, load: Sequence[RoutedRequest]) -> tuple[float, float]:
    """Return µs of CPU for a choice, and for a request's account from sending to its end."""
    names = [f"http://engine-{place}:8000" for place in range(engines)]
    router = make_router(parse_route(name), names, capacity_blocks=20_000, costs=[COSTS] * engines)
    choice_ns = account_ns = 0
    for request in load:
        done = request.number - IN_FLIGHT * engines
        began_ns = thread_time_ns()
        place = router.choose(request)
        chosen_ns = thread_time_ns()
        router.sent(request, place)
        router.first_token(done)
        router.ended(done, request.arrival_s)
        choice_ns += chosen_ns - began_ns
        account_ns += thread_time_ns() - chosen_ns
    empty_ns = clock_ns()
    return max(0.0, choice_ns / len(load) - empty_ns) / 1e3, max(0.0, account_ns / len(load) - empty_ns) / 1e3


def clock_ns(clock: Callable[[], int] = thread_time_ns, reads: int = 10_000) -> float:
    began_ns = clock()
    for _ in range(reads):
        clock()
    return (clock() - began_ns) / reads


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--blocks", type=int, default=24, help="of the first prompts (default: 24 of 512 tokens)")
    arguments = parser.parse_args()
    load = requests(arguments.requests, arguments.blocks)
    print("µs of CPU per request: choice / account")
    print(f"{'policy':14}" + "".join(f"{f'{size} engines':>16}" for size in SIZES))
    for name in POLICIES:
        cells = [measure(name, size, load) for size in SIZES]
        print(f"{name:14}" + "".join(f"{f'{choice:.1f} / {account:.1f}':>16}" for choice, account in cells))


if __name__ == "__main__":
    main()
