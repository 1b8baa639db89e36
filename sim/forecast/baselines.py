"""Simpler predictors of TTFT that a forecast has to beat, each told what the forecast is not: the cached tokens.

A line in uncached tokens, as the fit has it; and a queue with one server (M/G/1) whose service times the fitted model
gives.
"""

from dataclasses import replace

import numpy as np

from measure.metrics.requests import known
from measure.runs import STATUSES, Run
from sim.latency.modelfile import Model
from sim.latency.stepcost import STEPS, StepCost
from tracefile.records.arrays import FloatArray, IntArray

LINE = "linear_in_uncached_tokens"


def queued(arrival_ms: FloatArray, service_ms: FloatArray) -> FloatArray:
    """Return waits, service included, of requests served one at a time in their order (Lindley's recursion)."""
    done = np.cumsum(service_ms)
    return np.asarray(done + np.maximum.accumulate(arrival_ms - done + service_ms) - arrival_ms)


def predictors(model: Model, run: Run, *, cold: bool = False) -> dict[str, Run]:
    """Return a capture's run with the TTFTs of each predictor in place of its own.

    ``cold``: the load without sharing, which computes every prompt token.
    """
    prompts = known(run.prompt_tokens)
    uncached = prompts if cold else np.asarray(np.maximum(prompts - known(run.cached_tokens), 0.0))
    line, found = model.baselines.get(LINE), dict[str, Run]()
    if line is not None and line.intercept_ms is not None:
        found[LINE] = _seen(run, np.maximum(line.intercept_ms + line.per_uncached_token_ms * uncached, 0.0))
    tells = ~np.isnan(uncached) & ~np.isnan(run.arrival_ms)
    order = np.flatnonzero(tells)[np.argsort(run.arrival_ms[tells], kind="stable")]
    if len(order):
        output_tokens = np.maximum(run.output_tokens[order], 1)
        alone_ms, later_ms = service_ms(
            model, run.prompt_tokens[order], uncached[order].astype(np.int64), output_tokens
        )
        ttft_ms = np.full(len(run), np.nan)
        ttft_ms[order] = queued(run.arrival_ms[order], alone_ms + later_ms) - later_ms
        found["mg1_queue"] = _seen(run, ttft_ms)
    return found


def service_ms(
    model: Model, prompt_tokens: IntArray, uncached_tokens: IntArray, output_tokens: IntArray
) -> tuple[FloatArray, FloatArray]:
    """Return each request's TTFT in an idle engine, and the work that its later tokens add to steps of others."""
    cost, most = StepCost(list(model.costs)), max(model.engine.max_num_batched_tokens, 1)
    alone_ms, later_ms = np.zeros(len(prompt_tokens)), np.zeros(len(prompt_tokens))
    for place, (prompt, uncached, output) in enumerate(
        zip(prompt_tokens.tolist(), uncached_tokens.tolist(), output_tokens.tolist(), strict=True)
    ):
        alone_ms[place] = cost.reception_ms(prompt) + cost.delivery_ms(prompt)
        depth = prompt - max(uncached, 1)
        while depth < prompt:
            tokens = min(most, prompt - depth)
            cost.clear()
            cost.row[STEPS] = 1.0
            cost.count_chunk(tokens, depth)
            alone_ms[place] += cost.step_ms()
            depth += tokens
        cost.clear()
        cost.count_decodes(output - 1, (output - 1) * prompt + output * (output - 1) // 2, 0)
        later_ms[place] = cost.step_ms()
    return alone_ms, later_ms


def _seen(run: Run, ttft_ms: FloatArray) -> Run:
    """Return the run with these TTFTs, without those after its client would have aborted."""
    gone = np.isnan(run.ttft_ms) & ((run.e2e_ms < ttft_ms) | (run.status == STATUSES.index("error")))
    return replace(run, ttft_ms=np.where(gone, np.nan, ttft_ms))
