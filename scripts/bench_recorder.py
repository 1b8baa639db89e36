"""CPU time of the tap's recorder per record, from the frame on its socket to compressed bytes in the trace.

    python -m scripts.bench_recorder --records 20000 --prompt-tokens 64 1000 10000

Unary completions with token-id prompts, half of each shared with others, hashed. The best of many batches is what the
code costs; the mean is what it cost beside everything else this machine did meanwhile.
"""

import argparse
import json
import random
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from tap.ipc.exchange import ExchangeCopy, RecorderSetup, encode_frame
from tap.recorder.recorder import Recorder, decode_message
from tracefile.hashing.blockhash import DEFAULT_BLOCK_SIZE, HashKey
from tracefile.records.schema import HashInfo, Meta
from wire.process import split_frames

BATCH = 100
REPORT_BATCHES = 20
SHARED_PREFIXES = 20
OUTPUT_TOKENS = 16
NAME = "meta-llama/Llama-3.1-8B-Instruct"


def exchange(number: int, ids: list[int]) -> ExchangeCopy:
    """A completion as a worker hands it over."""
    request = {"model": NAME, "prompt": ids, "max_tokens": OUTPUT_TOKENS, "temperature": 0.0}
    choice = {"index": 0, "text": " the answer's sixteen tokens" * 2, "logprobs": None, "finish_reason": "length"}
    usage = {"prompt_tokens": len(ids), "completion_tokens": OUTPUT_TOKENS, "total_tokens": len(ids) + OUTPUT_TOKENS}
    answer = {"id": f"cmpl-{number:024x}", "object": "text_completion", "created": 1, "model": NAME}
    body = json.dumps({**answer, "choices": [choice], "usage": usage}).encode()
    arrival_ns = number * 100_000
    end_ns = arrival_ns + 20_000_000
    return ExchangeCopy(
        endpoint="/v1/completions",
        arrival_ns=arrival_ns,
        end_ns=end_ns,
        concurrency=32,
        request_headers={},
        request_body=[json.dumps(request).encode()],
        http_status=200,
        response_headers={"content-type": "application/json"},
        response_reads=[(end_ns, body)],
        response_whole=True,
        last_reads=[],
        outcome="ok",
        error_kind=None,
        upstream="http://127.0.0.1:8000",
        sent_ns=arrival_ns + 50_000,
    )


def batches(records: int, prompt_tokens: int) -> Iterator[bytearray]:
    """Frames as they lie in a socket, some at a time."""
    draw = random.Random(1)
    shared = [draw.choices(range(1000, 100_000), k=prompt_tokens // 2) for _ in range(SHARED_PREFIXES)]
    for start in range(0, records, BATCH):
        frames = bytearray()
        for number in range(start, start + BATCH):
            own = draw.choices(range(1000, 100_000), k=prompt_tokens - prompt_tokens // 2)
            frames += encode_frame(exchange(number, shared[number % SHARED_PREFIXES] + own))
        yield frames


def setup(trace: Path) -> RecorderSetup:
    """A recorder as ``tap --tokenizer ids`` starts one."""
    key = HashKey(bytes(32))
    info = HashInfo(algorithm="xxh3_64", key_id=key.key_id)
    return RecorderSetup(
        trace=str(trace),
        overwrite=False,
        meta=Meta(source="tap", block_size=DEFAULT_BLOCK_SIZE, hash=info, epoch_unix_ns=1),
        tokenizer="ids",
        key_secret=key.secret,
        algorithm="xxh3_64",
        block_size=DEFAULT_BLOCK_SIZE,
        hash_model=None,
        loras=[],
        epoch_ns=0,
    )


def measure(records: int, prompt_tokens: int, folder: Path) -> str:
    """Return one line of results."""
    trace = folder / f"{prompt_tokens}.jsonl.zst"
    recorder = Recorder(setup(trace))
    spent_ns = []
    for number, frames in enumerate(batches(records, prompt_tokens)):
        began_ns = time.process_time_ns()
        for message in map(decode_message, split_frames(frames)):
            assert isinstance(message, ExchangeCopy)
            recorder.take(message)
        if number % REPORT_BATCHES == 0:
            recorder.tick()
        spent_ns.append(time.process_time_ns() - began_ns)
    ended = recorder.close()
    assert ended.hashed == ended.recorded == len(spent_ns) * BATCH
    best_us, mean_us = min(spent_ns) / BATCH / 1e3, sum(spent_ns) / len(spent_ns) / BATCH / 1e3
    size = trace.stat().st_size / ended.recorded
    return f"{prompt_tokens:>13,} {best_us:>8.1f} {mean_us:>8.1f} {1e6 / best_us:>17,.0f} {size:>12,.0f}"


def main(argv: Sequence[str]) -> int:
    """Print a line for each length of prompt."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--records", type=int, default=20_000)
    parser.add_argument("--prompt-tokens", type=int, nargs="+", default=[64, 1000, 10_000])
    args = parser.parse_args(argv)
    print("prompt tokens  best µs  mean µs  records/s at best  bytes/record")
    with tempfile.TemporaryDirectory() as folder:
        for tokens in args.prompt_tokens:
            print(measure(args.records, tokens, Path(folder)), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
