"""Traffic of clients whose sessions are known: conversations as token ids, made into records of a trace."""

import heapq
import random
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from itertools import count

from tracefile.hashing.blockhash import BlockHasher
from tracefile.hashing.hashkey import HashKey
from tracefile.records.schema import BlockHash, Record, RequestId

B = 16
HASHER = BlockHasher(HashKey(bytes(32)), block_size=B)
SYSTEM, USER, ASSISTANT, TOOL, THINK, END = range(6)
WORDS = 4000


@dataclass(slots=True)
class Sent:
    """A request of a conversation."""

    prompt: list[int]
    output: list[int]
    parent: "Sent | None"
    """The request that it goes on from, as the client knows it."""
    aborted: bool = False
    name: str = ""
    arrival_ms: float = 0.0
    end_ms: float = 0.0


Step = Generator[tuple[float, Sequence[Sent]], None, None]
"""A client: yields the time that it thinks and the requests that it then sends at once; it goes on when all ended."""
Client = Callable[[random.Random], Step]


def words(r: random.Random, least: int, most: int) -> list[int]:
    return [10 + int(WORDS * r.random() ** 2) for _ in range(r.randint(least, most))]


def message(role: int, text: Sequence[int]) -> list[int]:
    return [role, *text, END]


def system(r: random.Random, variants: int = 3, tokens: int = 300) -> list[int]:
    """One of a few system prompts."""
    return message(SYSTEM, words(random.Random(r.randrange(variants)), tokens, tokens + 40))


def ask(r: random.Random, history: Sequence[int], output: list[int], parent: Sent | None, *header: int) -> Sent:
    return Sent([*history, ASSISTANT, *header], output, parent)


def altered(r: random.Random, output: Sequence[int]) -> list[int]:
    """The output as its client sends it back: other tokens from some point on."""
    at = r.randrange(len(output) + 1)
    return [*output[:at], *words(r, 1, max(1, len(output) - at))]


def chat(r: random.Random, *, again: Callable[[random.Random, Sequence[int]], list[int]], shortest: int = 8) -> Step:
    history, parent = system(r), None
    for _ in range(r.randint(1, 6)):
        history = [*history, *message(USER, words(r, shortest, 120))]
        sent = ask(r, history, words(r, 20, 300), parent)
        yield r.expovariate(1 / 4000), [sent]
        history, parent = [*history, ASSISTANT, *again(r, sent.output), END], sent


def exact(_: random.Random, output: Sequence[int]) -> list[int]:
    return list(output)


def agent(r: random.Random) -> Step:
    """Tool calls come back written otherwise; results follow."""
    history: list[int] = [*system(r, 2, 900), *message(USER, words(r, 30, 200))]
    parent = None
    for _ in range(r.randint(3, 15)):
        sent = ask(r, history, words(r, 20, 80), parent)
        yield r.expovariate(1 / 500), [sent]
        history = [*history, ASSISTANT, *altered(r, sent.output), END, *message(TOOL, words(r, 10, 600))]
        parent = sent


def thinking(r: random.Random, *header: int) -> Step:
    """Reasoning is removed from later prompts; ``header``: what the template begins it with."""
    history, parent = system(r), None
    for _ in range(r.randint(1, 5)):
        history = [*history, *message(USER, words(r, 8, 120))]
        answer = words(r, 20, 120)
        sent = ask(r, history, [*words(r, 40, 300), THINK, *answer], parent, *header)
        yield r.expovariate(1 / 4000), [sent]
        history, parent = [*history, ASSISTANT, *answer, END], sent


def compacted(r: random.Random) -> Step:
    """A long conversation begins again from a summary: nothing in its tokens tells."""
    opening = system(r)
    for _ in range(3):
        history, parent = [*opening, *message(USER, words(r, 60, 200))], None
        for _ in range(r.randint(2, 5)):
            sent = ask(r, history, words(r, 20, 200), parent)
            yield r.expovariate(1 / 2000), [sent]
            history = [*history, ASSISTANT, *sent.output, END, *message(USER, words(r, 8, 100))]
            parent = sent


def rollouts(r: random.Random) -> Step:
    """Several answers to one prompt, each of them continued."""
    opening = [*system(r), *message(USER, words(r, 30, 200))]
    sent = [ask(r, opening, words(r, 30, 200), None) for _ in range(r.randint(2, 6))]
    yield r.expovariate(1 / 4000), sent
    histories = [[*opening, ASSISTANT, *item.output, END] for item in sent]
    for _ in range(r.randint(1, 3)):
        histories = [[*history, *message(TOOL, words(r, 10, 80))] for history in histories]
        sent = [ask(r, history, words(r, 30, 200), item) for history, item in zip(histories, sent, strict=True)]
        yield r.expovariate(1 / 1000), sent
        histories = [[*history, ASSISTANT, *item.output, END] for history, item in zip(histories, sent, strict=True)]


def retried(r: random.Random) -> Step:
    """Some requests are given up half-way and sent again; some last messages are edited."""
    history, parent = system(r), None
    for _ in range(r.randint(2, 6)):
        before = history
        history = [*before, *message(USER, words(r, 8, 120))]
        if r.random() < 0.3:
            yield r.expovariate(1 / 3000), [Sent([*history, ASSISTANT], words(r, 10, 40), parent, aborted=True)]
        elif r.random() < 0.3:
            yield r.expovariate(1 / 3000), [ask(r, history, words(r, 20, 200), parent)]
            history = [*before, *message(USER, words(r, 8, 120))]
        sent = ask(r, history, words(r, 20, 200), parent)
        yield r.expovariate(1 / 3000), [sent]
        history, parent = [*history, ASSISTANT, *sent.output, END], sent


@dataclass(order=True, slots=True)
class _Event:
    at_ms: float
    number: int
    step: Step = field(compare=False)


def traffic(client: Client, seed: int, sessions: int = 150) -> list[Sent]:
    """All requests of clients that come in a Poisson stream, by their ends."""
    r, numbers = random.Random(seed), count()
    events: list[_Event] = []
    at_ms = 0.0
    for number in range(sessions):
        at_ms += r.expovariate(1 / 800)
        events.append(_Event(at_ms, next(numbers), client(random.Random(seed * 1000 + number))))
    done: list[Sent] = []
    while events:
        event = heapq.heappop(events)
        step = next(event.step, None)
        if step is None:
            continue
        think_ms, sent = step
        for item in sent:
            item.name, item.arrival_ms = f"r{len(done)}", event.at_ms + think_ms + r.random()
            item.end_ms = item.arrival_ms + 50 + len(item.output) * r.uniform(8, 12)
            done.append(item)
        heapq.heappush(events, _Event(max(item.end_ms for item in sent), event.number, event.step))
    return sorted(done, key=lambda item: item.end_ms)


def record_of(sent: Sent, *, output_ids: bool) -> Record:
    """The record of a request whose session has no name."""
    hashes = HASHER.hash_blocks([*sent.prompt, *sent.output[:-1]])
    full = len(sent.prompt) // B
    return Record(
        request_id=RequestId(sent.name),
        arrival_ms=sent.arrival_ms,
        e2e_ms=sent.end_ms - sent.arrival_ms,
        ttft_ms=50.0,
        status="client_abort" if sent.aborted else "ok",
        prompt_tokens=len(sent.prompt),
        output_tokens=len(sent.output),
        block_hashes=list(map(BlockHash, hashes[:full])),
        output_block_hashes=list(map(BlockHash, hashes[full:])) if output_ids else None,
    )
