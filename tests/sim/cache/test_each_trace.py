"""Curves and reuse of many engines: sums over their traces, the same bytes on one core and on a Ray cluster."""

import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from measure.metrics.sketches import ValueCounts
from measure.quantiles import quantile
from sim.__main__ import main
from sim.cache.reuse import LEVELS
from tracefile import BlockHash, InputError, Meta, Record, RequestId
from tracefile.files.writing import new_writer

ENGINES = ("a/tap.parquet", "b/tap.parquet", "c.jsonl")


def write(path: Path, seed: int, block_size: int = 16) -> None:
    """Prompts of one to six blocks over a few prefixes, a second apart."""
    draw = random.Random(seed)
    path.parent.mkdir(exist_ok=True)
    with new_writer(path, Meta(block_size=block_size), inputs=[]) as writer:
        for number in range(30 * seed):
            prefix, blocks = draw.randrange(3 + seed), draw.randint(1, 6)
            writer.write(
                Record(
                    request_id=RequestId(f"{seed}-{number}"),
                    arrival_ms=1000.0 * number,
                    prompt_tokens=blocks * block_size + 1,
                    block_hashes=[BlockHash(1000 * prefix + block + 1) for block in range(blocks)],
                )
            )


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("store")
    for seed, name in enumerate(ENGINES, 1):
        write(folder / name, seed)
    return folder


def told(capsys: pytest.CaptureFixture[str], *argv: str) -> Any:
    capsys.readouterr()
    assert main([*argv, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_hits_of_many_engines_are_the_sum_at_every_size(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    alone = [told(capsys, "curve", str(store / name))["curves"][0] for name in ENGINES]
    (merged,) = told(capsys, "curve", str(store), "--each-trace", "--procs", "1")["curves"]
    assert {one["sizes"][-1] for one in alone} != {merged["sizes"][-1]}, "caches of several sizes"
    for name in ("hit_blocks", "bound_blocks", "hit_tokens"):
        at_most = [[one[name][min(size, len(one[name])) - 1] for one in alone] for size in merged["sizes"]]
        assert merged[name] == [sum(each) for each in at_most]
    for name in ("lookup_blocks", "input_tokens", "requests", "whole_chains"):
        assert merged[name] == sum(one[name] for one in alone)
    only = told(capsys, "curve", str(store / "c.jsonl"), "--each-trace", "--procs", "1")
    assert only == told(capsys, "curve", str(store / "c.jsonl")), "one engine is a plain curve"


def test_reuse_of_many_engines_is_that_of_all_accesses(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    alone = [told(capsys, "reuse", str(store / name)) for name in ENGINES]
    merged = told(capsys, "reuse", str(store), "--each-trace", "--procs", "1")
    for name in ("requests", "accesses", "first_accesses"):
        assert merged[name] == sum(one[name] for one in alone)
    assert merged["time_ms"]["count"] == sum(one["time_ms"]["count"] for one in alone)
    only = told(capsys, "reuse", str(store / "c.jsonl"), "--each-trace", "--procs", "1")
    assert only | {"windows": None} == alone[2] | {"windows": None}
    assert main(["reuse", str(store), "--each-trace", "--procs", "1"]) == 0
    assert "windows" not in capsys.readouterr().out


@given(st.lists(st.lists(st.integers(0, 50), max_size=30), min_size=1, max_size=4))
def test_counts_of_parts_have_the_quantiles_of_the_whole(parts: list[list[int]]) -> None:
    whole = ValueCounts.of(np.array(parts[0], np.int64))
    for part in parts[1:]:
        whole = whole.plus(ValueCounts.of(np.array(part, np.int64)))
    values = sorted(value for part in parts for value in part)
    found = whole.distribution("ms", LEVELS)
    assert (found.count, found.mean) == (len(values), sum(values) / len(values) if values else None)
    assert found.quantiles == ([quantile(values, level) for level in LEVELS] if values else [])


@pytest.mark.parametrize("flags", [["--by", "session"], ["--sample", "0.1"], ["--block-sizes", "16,32"]])
def test_what_needs_a_whole_trace_is_refused(store: Path, flags: list[str]) -> None:
    with pytest.raises(InputError, match=rf"{flags[0]}: given with --each-trace"):
        main(["curve", str(store), "--each-trace", *flags])
    with pytest.raises(InputError, match="--each-trace: given with --kv-groups"):
        main(["curve", str(store), "--each-trace", "--kv-groups", "full:16"])
    with pytest.raises(InputError, match="--window: given with --each-trace"):
        main(["reuse", str(store), "--each-trace", "--window", "1m"])
    with pytest.raises(InputError, match="--ray: without --each-trace; expected both"):
        main(["reuse", str(store / "c.jsonl"), "--ray", "auto"])


def test_engines_of_two_block_sizes_are_no_sum(store: Path, tmp_path: Path) -> None:
    write(tmp_path / "a.jsonl", 1, 16)
    write(tmp_path / "b.jsonl", 2, 32)
    with pytest.raises(InputError, match=r"blocks of 32 tokens; expected 16, as in the others, or --block-size"):
        main(["curve", str(tmp_path), "--each-trace", "--procs", "1"])
    assert main(["curve", str(tmp_path), "--each-trace", "--procs", "1", "--block-size", "32"]) == 0


@pytest.mark.ray
@pytest.mark.timeout(600)
@pytest.mark.parametrize("action", ["sim curve", "sim reuse", "report show"])
def test_one_core_two_cores_and_a_cluster_print_the_same_bytes(cluster: str, store: Path, action: str) -> None:
    outputs = []
    for flags in (["--procs", "1"], ["--procs", "2"], ["--ray", cluster]):
        command = [sys.executable, "-m", *action.split(), str(store), "--each-trace", "--json", *flags]
        outputs.append(subprocess.run(command, capture_output=True, timeout=300, check=True).stdout)
    assert outputs[0] == outputs[1] == outputs[2] != b""
