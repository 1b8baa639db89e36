"""``sim watch`` beside the tap: a command of its own on the trace; no process of the tap loads the simulator."""

import asyncio
import subprocess
from pathlib import Path
from time import monotonic

from tap.ipc.stderr import say
from tap.supervisor.restarting import LONG_LIFE_S, REAP_S, backoff_s
from wire.process import module_command, module_environment, reap_child

BAD_INPUT = 2
"""Exit code of a command whose input is wrong: it would be the next time, too."""


async def watch_model(model: Path, trace: str, state: Path) -> None:
    """Keep ``sim watch`` running, its last judgement in ``state``, until cancelled; a model that it refuses ends it."""
    deaths = 0
    while True:
        began_s = monotonic()
        if await _watch(model, trace, state) == BAD_INPUT:
            say(f"--latency-model {model}: the traffic is not held to it; all else goes on")
            return
        deaths = 0 if monotonic() - began_s > LONG_LIFE_S else deaths + 1
        wait_s = backoff_s(deaths)
        say(f"the model watch died; the page keeps its last numbers; started again in {wait_s:g} s")
        await asyncio.sleep(wait_s)


async def _watch(model: Path, trace: str, state: Path) -> int:
    """Run the command to its end, passing its messages on; return its exit code. It ends when its input is closed."""
    process = subprocess.Popen(  # noqa: ASYNC220 - a fork, once; asyncio's own has no process groups under uvloop
        module_command("sim", "watch", trace, "--latency-model", str(model), "--follow", "-o", str(state)),
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        env=module_environment(),
        process_group=0,
    )
    messages = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(messages), process.stderr)
    try:
        async for line in messages:
            text = line.decode(errors="replace").rstrip()
            say(text.removeprefix("sim: error: ").removeprefix("sim watch: "))
        await reap_child(process, REAP_S)
        return process.returncode or 0
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
        if process.stdin is not None:
            process.stdin.close()
