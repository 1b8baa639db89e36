"""Flags of ``sim pool``, shared with ``sim curve`` and ``sim misses``."""

import argparse
from pathlib import Path

from sim.llamacpp.config import add_slot_flags
from sim.sglang.config import add_radix_flags
from sim.vllm.config import add_kv_groups

ENGINES = ("vllm", "sglang", "llamacpp")

EPILOG = "examples:\n  sim pool monday.jsonl.zst --num-gpu-blocks 20000\n"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_pool_flags(parser)
    add_kv_groups(parser)
    parser.add_argument(
        "--engine", choices=ENGINES, default="vllm", help="vLLM's block pool, SGLang's radix tree, or llama.cpp's slots"
    )
    parser.add_argument(
        "--bound", action="store_true", help="upper bound of hits over all eviction policies (Belady's)"
    )
    add_radix_flags(parser)
    add_slot_flags(parser)
    parser.add_argument("--json", action="store_true", help="print the counts as JSON")


def add_trace_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("trace", type=Path, help="trace with block hashes")
    parser.add_argument(
        "--block-size",
        type=int,
        metavar="TOKENS",
        help="tokens in a block, a multiple of the trace's (default: the engine's, else the trace's)",
    )


def add_pool_flags(parser: argparse.ArgumentParser) -> None:
    add_trace_flags(parser)
    parser.add_argument(
        "--num-gpu-blocks",
        default="inf",
        metavar="N",
        help="KV blocks of vLLM, the null block included: one fewer is usable",
    )


def run(arguments: argparse.Namespace) -> int:
    from sim.cache import pool

    return pool.run(arguments)
