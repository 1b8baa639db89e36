"""The built-in server as a process of its own: started, asked for the truth, let go."""

import contextlib
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import httpx
import msgspec

from loadgen.selftest.truth import Truth
from wire.process import module_command, module_environment


@dataclass(frozen=True, slots=True)
class TruthProcess:
    """A server that runs."""

    url: str
    pid: int

    def truth(self) -> Truth:
        """What it served up to now."""
        answer = httpx.get(f"{self.url}/truth", trust_env=False, timeout=60.0).raise_for_status()
        return msgspec.msgpack.decode(answer.content, type=Truth)


@contextlib.contextmanager
def truth_server(flags: Sequence[str] = (), *, prefix: Sequence[str] = ()) -> Iterator[TruthProcess]:
    """The server with ``flags`` for the length of the block; ``prefix`` runs it, ``taskset`` say."""
    command = [*prefix, *module_command("loadgen.selftest.truthserver", *flags)]
    pipe = subprocess.PIPE
    process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=module_environment())
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        url = process.stdout.readline().strip()
        if not url:
            raise RuntimeError(f"{command!r} did not start")
        yield TruthProcess(url, process.pid)
    finally:
        process.stdin.close()  # its sign to end
        try:
            process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        process.stdout.close()
