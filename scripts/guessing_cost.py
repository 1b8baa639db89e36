"""Cost of finding a prompt by guessing, with a trace and its key at hand: docs/privacy.md quotes this.

    python -m scripts.guessing_cost

A guess is one 16-token block after a prefix that is known: a hash, compared with the trace's. One core, in Python;
what a C program does on it, ``xxhsum -b7 -B72`` and ``openssl speed -bytes 72 -evp blake2b512`` tell.
"""

import hashlib
import itertools
import secrets
import struct
import time
from collections.abc import Callable, Iterator

import xxhash

BLOCK_TOKENS = 16
GUESSES = 2_000_000
SECRETS = {"a 4-digit PIN": 10**4, "a date of birth": 366 * 100, "a 6-digit code": 10**6, "a 9-digit number": 10**9}


def guessed_blocks() -> Iterator[bytes]:
    """Blocks that differ in two tokens, as a form does that was filled in: the rest of it is known."""
    known = struct.pack(f"<{BLOCK_TOKENS - 2}I", *range(1000, 1000 + BLOCK_TOKENS - 2))
    for number in itertools.count():
        yield known + struct.pack("<2I", *divmod(number, 1 << 16))


def guesses_per_second(hash_block: Callable[[bytes], bytes]) -> float:
    """Hashes compared in a second; making the guesses is not counted."""
    previous, wanted = secrets.token_bytes(8), secrets.token_bytes(8)
    inputs = [previous + block for block in itertools.islice(guessed_blocks(), GUESSES)]
    began = time.perf_counter()
    found = sum(hash_block(data) == wanted for data in inputs)
    took = time.perf_counter() - began
    assert found == 0
    return GUESSES / took


def algorithms() -> dict[str, Callable[[bytes], bytes]]:
    """Each of ``--hash`` as ``tracefile/hashing/blockhash.py`` computes it for one block."""
    seed, key = secrets.randbits(64), secrets.token_bytes(32)
    keyed = hashlib.blake2b(key=key, person=b"block hash", digest_size=8)

    def blake2b(data: bytes) -> bytes:
        state = keyed.copy()
        state.update(data)
        return state.digest()

    return {"xxh3_64": lambda data: xxhash.xxh3_64_digest(data, seed), "blake2b": blake2b}


def duration(seconds: float) -> str:
    """In the unit that a person would use."""
    for unit, size in (("years", 31_557_600.0), ("days", 86_400.0), ("hours", 3600.0), ("minutes", 60.0)):
        if seconds >= 2 * size:
            return f"{seconds / size:,.0f} {unit}"
    return f"{seconds:.2g} s"


def main() -> None:
    """Print the rates, and what they mean for secrets of known size."""
    for name, hash_block in algorithms().items():
        rate = guesses_per_second(hash_block)
        print(f"{name}: {rate / 1e6:.1f} million guesses/s on one core")
        for what, size in SECRETS.items():
            print(f"  all of {what} ({size:,}): {duration(size / rate)}")
        print(f"  all 64-bit seeds: {duration(2**64 / rate)}")


if __name__ == "__main__":
    main()
