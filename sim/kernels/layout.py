"""Arrays that the kernels work on: one array of records per kind of object, with fields named as in the plain classes.

A record holds together what is used together, so a decoding request costs one or two cache lines a step. Single
objects (the clock, the free queue's length) are arrays of one record. Times in ms; −1 and NaN: not yet.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from tracefile.records.arrays import FloatArray, UInt64Array

Records = npt.NDArray[np.void]
Ints = npt.NDArray[np.int32]
Places = npt.NDArray[np.int64]

WAITING, RUNNING, FINISHED, ABSENT, LOADING = range(5)
"""State of a request; ABSENT: the scheduler has not got it; LOADING: it waits for blocks from a tier."""
NO_OUTCOME, OK, ABORTED, UNSERVABLE, PARENT_FAILED, AS_RECORDED, LOST, NO_ENGINE = map(np.int64, range(8))
OUTCOMES = (None, "ok", "aborted", "unservable", "parent_failed", "as_recorded", "lost", "no_engine")
"""Of a fleet alone: the request's engine died while it streamed; no engine was up when it came."""
NONE = -1
PLACEMENTS = ("parallel", "serial", "shared_core")
PARALLEL, SERIAL, SHARED_CORE = range(3)


def record(integers: str, times: str = "") -> np.dtype[np.void]:
    """Record type of 64-bit fields only, so that kernels need no second version for narrower numbers."""
    return np.dtype([(name, np.float64) for name in times.split()] + [(name, np.int64) for name in integers.split()])


SETTINGS = record(
    "block_size max_num_seqs max_num_batched_tokens enable_prefix_caching composes_ahead placement usable_blocks "
    "max_tokens pauses"
)
"""``pauses``: the engine stands still within a step where unknown arrivals may come; of a fleet's engines."""
SEGMENT = record("kind base start end first_key copy next_in_slot")
"""Blocks ``start`` to ``end`` of a chain, whose key number d is ``keys[base + d]``. ``copy``: the first in line; of a
free segment, the next free one."""
COPY = record("segment references deeper before after previous_twin next_twin")
"""Some blocks in the free queue or held; ``deeper``: the copy that was cut off last; ``after``: of a free one, the
next."""
HOLD = record("copy end next")
"""Blocks of a chain up to ``end`` that a request holds, from where its hold before ends."""
POOL = record(
    "num_free num_unhashed num_segments free_segment num_copies free_copy num_holds free_hold evicted_blocks "
    "not_chained num_repeated"
)
"""``num_unhashed``: blocks at the queue's head that hold nothing known; ``num_…``: records used so far, those that are
free again in lists from ``free_…`` on; ``not_chained``: a key
was met at two depths; ``num_repeated``: holds of blocks that another request held before."""
REQUEST = record(
    "prompt_tokens last_token num_tokens num_computed room_tokens next_full num_hashed num_blocks placeholders "
    "steps_in_flight stale_steps cached_tokens preemptions state next_waiting previous_waiting "
    "prompt_logprobs first_key known_keys serial first_hold last_hold tail",
    times="arrival_ms",
)
"""``first_key``: where the keys of its chain that the trace knows begin, ``known_keys`` of them; the others are its own
by its ``serial`` number. ``tail``: the copy that its last hold begins with, or one deeper."""
REQUEST_RUN = record(
    "outcome as_recorded parent first_child next_child first_token num_seen",
    times="arrival_ms entry_ms admitted_ms think_ms abort_after_ms recorded_e2e_ms ttft_ms e2e_ms left_ms "
    "next_think_ms",
)
"""``first_token``: where its part of the arenas of tokens begins, once it has one; ``left_ms``: of its work on a shared
core; ``next_think_ms``: from its end to the first arrival that waits for it in a fleet; infinity: none does."""
SHARE = record("place num_tokens depth samples")
STEP = record("count total_tokens admitted preempted repeated_tokens")
EVENT = record("code", times="time_ms")
PREFIX_STATS = record("requests query_tokens hit_tokens")
SCHEDULE = record("num_running num_waiting is_quiet")
CLOCK = record(
    "composed running num_tokens num_arrivals num_events first_job last_job num_done num_steps preemptions steps_drawn",
    times="now_ms frontend_free_ms horizon_ms slow slow_at_ms slowest_factor seen_ms carried_ms step_end_ms start_ms "
    "left_ms resumes_ms",
)
"""``horizon_ms``: unknown arrivals come then or later; infinity: there are none. ``num_tokens``: reserved part of the
arenas of tokens. ``slow``: last autocorrelated normal, drawn at ``slow_at_ms``. ``slowest_factor``: upper bound of a
step's noise. ``seen_ms``: time at which clients see the last step's tokens. ``carried_ms``: rest of a delivery, done
beside the next step. ``step_end_ms``: of the engine's last step; minus infinity: none ran. ``running``: slot of a step
that began at ``start_ms`` and has ``left_ms`` to go; it goes on at ``resumes_ms`` or later."""


HOST, DISK = range(2)
"""Tiers behind the pool (``sim.kernels.tiers``)."""
TIERS = record(
    "is_on host_blocks disk_blocks block_size first_loading first_ended "
    "last_ended loads loaded_tokens stored_blocks disk_read_blocks disk_stored_blocks",
    times="now_ms token_ms latency_ms disk_token_ms disk_latency_ms read_free_ms write_free_ms disk_read_free_ms "
    "disk_write_free_ms",
)
"""An engine's links, and what went over them. ``…_free_ms``: all transfers asked for so far are done then.
``first_…``: of requests being loaded, and of those that ended and whose blocks do not count as used yet."""
TIER_COUNTS = record("host_used disk_used host_evicted disk_evicted round")
"""``round``: number of the last look at blocks that must not displace each other."""
TIER_BLOCK = record("key kind older newer next_in_slot round", times="ready_ms busy_ms")
"""A block that a tier keeps, readable from ``ready_ms`` on and in transit until ``busy_ms``. The first two are the ends
of the tiers' lists by use."""
TIER_REQUEST = record("first stored next noted", times="done_ms")
"""``first`` to ``stored``: depths of a request's blocks that it stored or loaded; ``done_ms``: end of its transfer, of
which the step loop knows if it is ``noted``; ``next``: in a list of ``TIERS``."""


class Pool(NamedTuple):
    """The free queue and the prefix cache, by segments of chains."""

    settings: Records
    counts: Records
    segments: Records
    """SEGMENT by number, from 1 on."""
    copies: Records
    """COPY by number, from 1 on; number 0 is both ends of the free queue."""
    holds: Records
    """HOLD by number, from 1 on."""
    table: Ints
    """By a first key's slot, of 2**n: the segment entered last; it leads to the others."""
    keys: UInt64Array
    """What is known of every request's chain and of every segment's."""


class Tier(NamedTuple):
    """Blocks behind the pool; ``counts``, ``blocks`` and ``table`` may be several engines'."""

    state: Records
    counts: Records
    blocks: Records
    """TIER_BLOCK: two ends of lists, the host's, the disk's."""
    table: Ints
    """By a key's slot, of 2**n: the block entered last."""
    requests: Records
    """TIER_REQUEST by place; one row if there are no tiers."""


class Scheduler(NamedTuple):
    """Requests waiting and running on the pool."""

    settings: Records
    pool: Pool
    tier: Tier
    requests: Records
    """REQUEST by place in the workload; one more, the two ends of the waiting line."""
    running: Places
    """Places in order, as far as ``num_running``."""
    shares: Records
    """SHARE by slot and number: two steps' worth, as one may be composed while one runs."""
    steps: Records
    state: Records
    stats: Records
    finished: Places
    due: Places
    """By tokens until a block is full: the first position of ``running`` of which that is true, and 1."""
    also_due: Places
    """By position: the next of the same, and 1."""


class Draws(NamedTuple):
    """Tables and keys of the noise (``sim.latency.noise``)."""

    step_key: npt.NDArray[np.uint64]
    """Key of the stream of the steps' draws, alone; empty: medians."""
    step_knots: FloatArray
    """log(ms) of the rows of ``step_table``."""
    step_table: FloatArray
    """log(factor of a step) by knot and normal; no rows: every factor is 1."""
    normals: FloatArray
    weights: FloatArray
    """Weight of the autocorrelated part of a step's factor, weight of the independent part, correlation time in ms."""
    frontend: FloatArray
    """By place: factor on the API server's time."""


class Timeline(NamedTuple):
    """Steps, as far as the clock's ``num_steps``."""

    starts_ms: FloatArray
    ends_ms: FloatArray
    rows: FloatArray
    seen_ms: FloatArray
    """When clients see a step's tokens."""


class SimState(NamedTuple):
    """All state of a run."""

    scheduler: Scheduler
    costs: FloatArray
    """By the terms of ``sim.latency.terms.TERMS``."""
    clock: Records
    runs: Records
    """REQUEST_RUN by place."""
    arrivals: Records
    """A heap of EVENT, by time and place."""
    events: Records
    """A heap of EVENT, by time, kind and place."""
    jobs: Places
    """Places of requests that the API server on a shared core works on, in their order, from ``first_job``."""
    done: Records
    """EVENT per request that the API server has finished and not yet handed over."""
    draws: Draws
    timeline: Timeline
    token_steps: Ints
    """Tokens of requests that have any, from ``first_token`` on: the step at whose end each appeared."""
    itl_ms: FloatArray
    """Beside them: the gap before each token but the first."""
