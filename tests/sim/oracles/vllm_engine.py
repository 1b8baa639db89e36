"""Cached tokens of prompts on a real vLLM of random weights, in one process.

    VENV/bin/python vllm_engine.py MODEL_DIR < plan.json > hits.json

Needs vLLM (tried with 0.32.0, CPU build) and nothing of this project. A plan is ``{"engine": {}, "batches": []}``, a
batch ``[{"prompt": [token, …], "output": tokens}, …]``; it comes at once, when the one before it has ended.
"""

import json
import os
import sys
from typing import Any

os.environ.update(
    HF_HUB_OFFLINE="1",
    TRANSFORMERS_OFFLINE="1",
    VLLM_NO_USAGE_STATS="1",
    DO_NOT_TRACK="1",
    VLLM_LOGGING_LEVEL="ERROR",
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    VLLM_CPU_KVCACHE_SPACE="1",
    VLLM_CPU_OMP_THREADS_BIND="nobind",
    OMP_NUM_THREADS="1",
)

from vllm import LLM, SamplingParams


def serve(engine: Any, batch: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Cached tokens and outputs of a batch."""
    prompts = [{"prompt_token_ids": request["prompt"]} for request in batch]
    sampling = [SamplingParams(max_tokens=request["output"], ignore_eos=True, detokenize=False) for request in batch]
    outputs = engine.generate(prompts, sampling, use_tqdm=False)
    return [{"cached": output.num_cached_tokens, "output": list(output.outputs[0].token_ids)} for output in outputs]


def main() -> None:
    """Serve the plan on stdin."""
    plan = json.load(sys.stdin)
    engine = LLM(model=sys.argv[1], skip_tokenizer_init=True, load_format="dummy", enforce_eager=True, **plan["engine"])
    groups = engine.llm_engine.engine_core.engine_core.scheduler.kv_cache_config.kv_cache_groups
    results = [serve(engine, batch) for batch in plan["batches"]]
    print()
    print(json.dumps({"blocks": [group.kv_cache_spec.block_size for group in groups], "found": results}))


if __name__ == "__main__":
    main()
