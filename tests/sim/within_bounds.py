"""Commands whose kernels check each index, on arrays that begin small: ``python -m tests.sim.within_bounds LOADS``.

Compiled code checks none by itself: behind an array's end it writes into other memory, and perhaps nothing tells. With
NUMBA_BOUNDSCHECK=1 it raises IndexError instead.
"""

import io
import os
import sys
from collections import Counter
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from measure.cache import interning
from measure.machinecode.entries import entry
from report.__main__ import main as report
from sim.__main__ import main as sim
from sim.engine import fleet, simstate, tiers
from sim.latency.modelfile import default_model, save_model
from tests.sim.engine.test_compiled import load
from tracefile import BlockHash, HashInfo, Meta, Record, RequestId, TraceWriter
from tracefile.records import batches
from tracefile.records.arrays import IntArray
from tracefile.records.errors import InputError

CAPTURES = Path(__file__).parents[2] / "data" / "captures"
BLOCK = 4
SMALL = (
    (interning, "PIECE", 5),
    (fleet, "FIRST_STEPS", 4),
    (simstate, "MOST_SLOTS", 8),
    (tiers, "MOST_SLOTS", 8),
    (batches, "BATCH", 50),
)
"""Sizes of what grows, or of what comes at once."""
HOST = ("--host-blocks", "1000", "--kv-bytes-per-token", "1000000", "--host-gb-per-s")
CACHES = (*(["pool"], ["misses"], ["curve"], ["pool", "--bound"], ["curve", "--window", "10s"]),)
GROUPS = tuple(
    ["pool", "--kv-groups", groups]
    for groups in (f"full:{BLOCK}+window(16):{BLOCK}", f"full:{BLOCK}+mamba:{BLOCK}", f"window(8):{BLOCK}")
)
RUNS: tuple[list[str], ...] = (
    *([], ["--replay-sessions"], ["--no-async-scheduling"]),
    *(["--kv-groups", f"full:{BLOCK}+window(16):{BLOCK}"], ["--replicas", "3", "--route", "cost"]),
    *([*HOST, "0.1"], [*HOST, "25", "--disk-blocks", "300"]),
    ["--replicas", "2", "--route", "prefix", "--event", "kill:engine=2:at=50ms:back=90ms"],
)


@entry
def read(values: IntArray, place: int) -> int:
    return int(values[place])


class Commands:
    """Commands on traces in one folder; ``ran`` counts them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.ran: Counter[str] = Counter()
        save_model(default_model(), folder / "model.json")

    def write(self, records: list[Record]) -> str:
        path, hashes = self.folder / "trace.jsonl", HashInfo(algorithm="xxh3_64")
        path.unlink(missing_ok=True)
        with TraceWriter(path, Meta(source="tap", block_size=BLOCK, hash=hashes)) as writer:
            for record in records:
                writer.write(record)
        return str(path)

    def cache(self, trace: str, words: list[str], blocks: int) -> None:
        sizes = ["--num-gpu-blocks", str(blocks)] if words[0] in {"pool", "misses"} else []
        self._call(sim, [words[0], trace, *words[1:], *sizes])

    def run(self, trace: str, words: list[str], blocks: int, running: int) -> None:
        model, output = str(self.folder / "model.json"), str(self.folder / "predicted.jsonl")
        sizes = ["--block-size", str(BLOCK), "--num-gpu-blocks", str(blocks), "--max-num-seqs", str(running)]
        self._call(sim, ["run", trace, "--latency-model", model, "-o", output, "--overwrite", *sizes, *words])

    def show(self, trace: str) -> None:
        self._call(report, ["show", trace])

    def _call(self, main: Callable[[list[str]], int], words: list[str]) -> None:
        self.ran[words[0]] += 1
        try:
            with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
                main(words)
        except InputError:  # a pool or a host that holds no prompt
            self.ran["refused"] += 1
        except BaseException:
            print(*words, file=sys.stderr)
            raise


def request(number: int, keys: list[int], more: int = 0, arrival_ms: float | None = None, output: int = 1) -> Record:
    return Record(
        request_id=RequestId(f"r{number}"),
        arrival_ms=10.0 * number if arrival_ms is None else arrival_ms,
        e2e_ms=5.0,
        prompt_tokens=BLOCK * len(keys) + more,
        output_tokens=output,
        block_hashes=[BlockHash(key) for key in keys],
    )


def many_that_load() -> list[Record]:
    """Prompts on one prefix; others, which evict them all; the prefix; all of them at once, from the host's memory."""
    prefix, own = list(range(1, 5)), [[100 * number, 100 * number + 1] for number in range(1, 41)]
    first = [request(number, prefix + keys, 1, 1e3 * number) for number, keys in enumerate(own)]
    others = [request(100 + number, list(range(9000 + 10 * number, 9008 + 10 * number))) for number in range(40)]
    for number, record in enumerate(others):
        record.arrival_ms = 1e5 + 1e3 * number
    parts = [request(200 + number, [*prefix[: number + 1], 7 + number], 1, 2e5 + 1e3 * number) for number in range(4)]
    return first + others + parts + [request(300 + number, prefix + keys, 1, 3e5) for number, keys in enumerate(own)]


def known_loads(commands: Commands) -> None:
    """Run loads that once wrote behind an array, or that have most of what arrays hold."""
    equal = commands.write([request(number, [1, 2]) for number in range(980)])
    for words in CACHES[:4]:
        commands.cache(equal, words, 1 << 20)
    behind = commands.write([request(number, [1, 100 + 2 * number, 101 + 2 * number], 2) for number in range(3000)])
    for words in CACHES:
        commands.cache(behind, words, 5000)
    commands.run(commands.write(many_that_load()), [*HOST, "0.5"], 250, 1)
    # Its prompt fits into the pool of a prefill worker, and its output into none.
    commands.run(commands.write([request(0, [1, 2], 0, 0.0, 60)]), RUNS[-1], 9, 4)


def captured_loads(commands: Commands) -> None:
    captures = sorted(CAPTURES.rglob("*.jsonl.zst"))
    for number, path in enumerate(captures):
        commands.cache(str(path), CACHES[number % len(CACHES)], 200)


@given(st.data(), st.integers(0, 1 << 32), st.sampled_from([1, 2, 5, 20, 60, 200]), st.sampled_from([0.0, 1.0, 30.0]))
@settings(max_examples=60, deadline=None, database=None, derandomize="CI" in os.environ)
def random_loads(commands: Commands, data: st.DataObject, seed: int, requests: int, spacing_ms: float) -> None:
    trace = commands.write(load(Random(seed), requests, spacing_ms))
    blocks = data.draw(st.sampled_from([4, 12, 40, 200, 3000]))
    commands.cache(trace, data.draw(st.sampled_from([*CACHES, *GROUPS])), blocks)
    commands.run(trace, data.draw(st.sampled_from(RUNS)), blocks, data.draw(st.sampled_from([1, 2, 8])))
    commands.show(trace)


def unchained_loads(commands: Commands) -> None:
    """Run requests whose blocks come in another order each time: a key at one depth behind several others."""
    for seed in range(12):
        random = Random(seed)
        shuffled = seed % 2  # then a key is at several depths, too
        chains = [[1 + random.randrange(2)] for _ in range(30)]
        for chain in chains:
            for depth in range(1, random.choice([1, 2, 3, 10, 30])):
                chain.append(chain[-1] + 1 + random.randrange(2) if shuffled else 1 + 2 * depth + random.randrange(2))
        trace = commands.write(
            [request(number, chain, 1, None, random.choice([1, 9, 30])) for number, chain in enumerate(chains)]
        )
        blocks = random.choice([40, 60, 200])
        for words in (CACHES[seed % len(CACHES)], GROUPS[seed % len(GROUPS)]):
            commands.cache(trace, words, blocks)
        for words in ([], RUNS[seed % len(RUNS)]):
            commands.run(trace, words, blocks, random.choice([1, 2, 8]))


def many_requests(commands: Commands) -> None:
    trace = commands.write(load(Random(1), 3000, 5.0))
    for words in CACHES:
        commands.cache(trace, words, 300)


def published_loads(commands: Commands) -> None:
    """Run the Mooncake hour, in the folder that KVTAPE_DATA names."""
    for words in (["pool"], ["misses"], ["curve"]):
        commands.cache(str(Path(os.environ["KVTAPE_DATA"]) / "mooncake" / "conversation_trace.jsonl"), words, 10_001)


LOADS = {
    run.__name__: run
    for run in (known_loads, captured_loads, unchained_loads, many_requests, random_loads, published_loads)
}


def main() -> None:
    try:
        read(np.zeros(3, np.int64), 3)
    except IndexError:
        pass
    else:
        sys.exit("no index is checked; expected NUMBA_BOUNDSCHECK=1")
    for owner, name, value in SMALL:
        setattr(owner, name, value)
    with TemporaryDirectory() as folder:
        commands = Commands(Path(folder))
        LOADS[sys.argv[1]](commands)
    print(*(f"{count} {name}" for name, count in sorted(commands.ran.items())))


if __name__ == "__main__":
    main()
