"""The front end before the scheduler, as in ``sim.latency.clocks.FrontendClock`` and ``sim.latency.sharedcore``."""

from sim.kernels.compiling import kernel
from sim.kernels.layout import PARALLEL, World

DONE_MS = 1e-9  # what rounding may leave of a job


@kernel
def work_ms(world: World, place: int) -> float:
    """Time to take in a request."""
    costs, tokens = world.costs[0], world.scheduler.requests[place].prompt_tokens
    return float((costs.f0_ms + costs.f1_ms_per_prompt_token * tokens) * world.draws.frontend[place])


@kernel
def entry_ms(world: World, place: int, arrival_ms: float) -> float:
    """When a front end on a core of its own hands a request over: after its arrival, or after the one before it."""
    if world.scheduler.settings[0].placement == PARALLEL:
        return arrival_ms + work_ms(world, place)
    clock = world.clock[0]
    clock.frontend_free_ms = max(arrival_ms, clock.frontend_free_ms) + work_ms(world, place)
    return float(clock.frontend_free_ms)


@kernel
def accept_job(world: World, place: int) -> None:
    """A request has arrived at the shared core."""
    clock = world.clock[0]
    world.jobs[clock.last_job] = place
    clock.last_job += 1
    world.flights[place].left_ms = work_ms(world, place)


@kernel
def run_beside(world: World, left_ms: float, until_ms: float) -> tuple[float, float, float]:
    """Run until ``left_ms`` of the engine's work are done, or until ``until_ms``.

    Returns the engine's work that is left, and what the front end did, as a row's last terms.
    """
    clock, requests, tokens = world.clock[0], 0.0, 0.0
    now_ms = clock.now_ms
    while left_ms > 0.0 and now_ms < until_ms:
        if clock.first_job == clock.last_job:
            span_ms = min(left_ms, until_ms - now_ms)
            now_ms, left_ms = now_ms + span_ms, left_ms - span_ms
            continue
        place = world.jobs[clock.first_job]
        span_ms = min(2.0 * left_ms, 2.0 * world.flights[place].left_ms, until_ms - now_ms)
        now_ms += span_ms
        left_ms = max(left_ms - span_ms / 2.0, 0.0)
        share = _work(world, span_ms / 2.0, now_ms)
        requests += share
        tokens += share * world.scheduler.requests[place].prompt_tokens
    clock.now_ms = now_ms
    return left_ms, requests, tokens


@kernel
def run_alone(world: World, until_ms: float) -> tuple[float, float]:
    """Run while the engine is idle, to the end of the current job or to ``until_ms``; a row's last terms."""
    clock = world.clock[0]
    place, start_ms = world.jobs[clock.first_job], clock.now_ms
    end_ms = min(start_ms + world.flights[place].left_ms, until_ms)
    clock.now_ms = end_ms
    share = _work(world, end_ms - start_ms, end_ms)
    return share, share * world.scheduler.requests[place].prompt_tokens


@kernel
def _work(world: World, span_ms: float, now_ms: float) -> float:
    """Do ``span_ms`` of the current job, which ends at ``now_ms`` if that is all; its share."""
    clock = world.clock[0]
    place = world.jobs[clock.first_job]
    flight, whole_ms = world.flights[place], work_ms(world, place)
    flight.left_ms -= span_ms
    if flight.left_ms <= DONE_MS:
        clock.first_job += 1
        world.done[clock.num_done].time_ms = now_ms
        world.done[clock.num_done].code = place
        clock.num_done += 1
    return float(span_ms / whole_ms) if whole_ms > 0.0 else 1.0
