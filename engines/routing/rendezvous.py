"""Order of engines that needs no state: by rendezvous hash. The tap and the simulation share it."""

from collections.abc import Sequence

import xxhash

from engines.routing.records import RoutedEngine, RoutedRequest


def engine_seed(name: str) -> int:
    """Return the seed of an engine's hashes in ``by_rendezvous``."""
    return xxhash.xxh3_64_intdigest(name.encode())


def by_rendezvous(seeds: Sequence[int], session: bytes) -> list[int]:
    """Return the places as a session prefers them: by hash of session and engine, so that no other session moves."""
    weights = [xxhash.xxh3_64_intdigest(session, seed) for seed in seeds]
    return sorted(range(len(seeds)), key=weights.__getitem__, reverse=True)


def first_by_rendezvous(engines: Sequence[RoutedEngine], session: bytes) -> int:
    """Return the first place of ``by_rendezvous``."""
    weights = [xxhash.xxh3_64_intdigest(session, engine.seed) for engine in engines]
    return weights.index(max(weights))


def affinity_key(request: RoutedRequest) -> bytes | None:
    """Return the key that keeps requests together: the session, without it the first block. None: neither is known."""
    if request.session is not None:
        return request.session
    return b"block %d" % request.blocks[0] if request.blocks else None
