"""Faults beside the traffic: each an action on a running tap, and the effect it must have."""

import asyncio
import json
import os
import resource
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

from scripts.proxybench.faults import Fault, FaultImpossibleError, Scene
from scripts.proxybench.processes import free_port, gone
from scripts.proxybench.tapprocess import RunningTap, records_in_files
from scripts.timedclient import Client
from wire.url import Origin

LIBFAKETIME = "/usr/lib/*/faketime/libfaketimeMT.so.1"
SMALL_DISK = 128 << 10
GOES_ON_S = 60.0
CRASHES = 2
ADMIN_CLIENTS = 4
ADMIN_PATHS = ("/", "/metrics", "/healthz", "/readyz")
CLOCK_STEPS_S = (3600, -7200, 0)


async def recording_goes_on(scene: Scene, tap: RunningTap) -> None:
    """Wait for new records in the trace: serving on without them is half of what a fault must leave."""
    before = records_in_files(tap.trace)
    deadline = asyncio.get_running_loop().time() + GOES_ON_S
    while records_in_files(tap.trace) <= before:
        if asyncio.get_running_loop().time() > deadline:
            scene.problems.append(f"no record in {GOES_ON_S:g} s after the fault")
            return
        await asyncio.sleep(0.2)


async def kill_recorder(scene: Scene, tap: RunningTap) -> None:
    """Kill it, let another one start and work, kill that one too."""
    for _ in range(2):
        recorder = await tap.pid("recorder")
        os.kill(recorder, signal.SIGKILL)
        await gone(recorder)
        await recording_goes_on(scene, tap)
    scene.done = "SIGKILL to the recorder, twice"


async def stop_recorder(scene: Scene, tap: RunningTap) -> None:
    """A recorder that hangs: what cannot be kept for it is dropped."""
    recorder = await tap.pid("recorder")
    os.kill(recorder, signal.SIGSTOP)
    await asyncio.sleep(scene.seconds / 3)
    os.kill(recorder, signal.SIGCONT)
    await recording_goes_on(scene, tap)
    scene.done = "SIGSTOP to the recorder, SIGCONT later; a queue of 1 MB"


def small_queue(scene: Scene) -> None:
    """Little room for what waits for the recorder."""
    scene.flags += ["--queue-mb", "1"]


def small_disk(scene: Scene) -> None:
    """A file system of 128 KB for the trace, where this user may mount one."""
    disk = scene.folder / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={SMALL_DISK}", "kvtape-fault", str(disk)]
    if subprocess.run(mount, capture_output=True, check=False).returncode == 0:
        scene.trace = disk / "captured.jsonl"
        scene.undo = lambda: unmount(disk)


def unmount(disk: Path) -> None:
    """Give the small disk back."""
    subprocess.run(["umount", str(disk)], check=True)


async def fill_disk(scene: Scene, tap: RunningTap) -> None:
    """Wait until the disk is full and traffic has met that, then make room: recording is to go on."""
    recorder = await tap.pid("recorder")
    if scene.trace is None:
        limits = resource.prlimit(recorder, resource.RLIMIT_FSIZE)
        resource.prlimit(recorder, resource.RLIMIT_FSIZE, (SMALL_DISK, limits[1]))
    while tap.trace.stat().st_size < SMALL_DISK * 0.9:  # noqa: ASYNC110  another process's file
        await asyncio.sleep(0.05)
    await asyncio.sleep(scene.seconds / 3)
    full = tap.trace.stat().st_size
    if scene.trace is None:
        resource.prlimit(recorder, resource.RLIMIT_FSIZE, limits)
        scene.done = f"files may not grow past {full:,} bytes (RLIMIT_FSIZE: no right to mount a tmpfs), later they may"
    else:
        subprocess.run(["mount", "-o", "remount,size=64m", str(scene.trace.parent)], check=True)  # noqa: ASYNC221
        scene.done = f"tmpfs of {SMALL_DISK:,} bytes, full; later 64 MB"
    await recording_goes_on(scene, tap)


def disk_was_full(scene: Scene, tap: RunningTap) -> None:
    """A disk that lost nothing was not full."""
    if not tap.account.get("dropped"):
        scene.problems.append("nothing was lost: the disk was not full for long enough")


# A tokenizer that fails is the tap's own with a fault put in, by a file that Python runs at its start.
FAULTY_TOKENIZER = """
import os, signal, sys
if "tap.recorder.recorder" in sys.orig_argv:
    from tap.prompts.tokenizer import TransformersTokenizer
    encode, calls = TransformersTokenizer.encode_text, [0]
    def failing(self, text, **options):
        calls[0] += 1
        if calls[0] % {every} == 0:
            with open({faults!r}, "a") as faults:
                faults.write("x")
            if os.path.getsize({faults!r}) <= {times}:
                {fail}
        return encode(self, text, **options)
    TransformersTokenizer.encode_text = failing
"""


def faulty_tokenizer(fail: str, *, every: int, times: int) -> Callable[[Scene], None]:
    """A tokenizer that does ``fail`` at every so manieth prompt of its process, so often in all."""

    def prepare(scene: Scene) -> None:
        tokenizer, code = scene.folder / "tokenizer", scene.folder / "code"
        save_tokenizer(tokenizer)
        code.mkdir()
        source = FAULTY_TOKENIZER.format(every=every, fail=fail, times=times, faults=str(scene.folder / "faults"))
        (code / "sitecustomize.py").write_text(source)
        scene.flags, scene.text_prompts = ["--tokenizer", str(tokenizer)], True
        scene.environment["PYTHONPATH"] = str(code)

    return prepare


def save_tokenizer(folder: Path) -> None:
    """A tokenizer of a few hundred tokens: one per byte."""
    from tokenizers import Tokenizer, models, pre_tokenizers  # noqa: PLC0415  heavy, for one fault

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    bytes_only = Tokenizer(models.BPE(vocab={letter: number for number, letter in enumerate(alphabet)}, merges=[]))
    bytes_only.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    folder.mkdir()
    bytes_only.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')


async def wait_for_errors(scene: Scene, tap: RunningTap) -> None:
    """The tokenizer fails by itself."""
    await asyncio.sleep(scene.seconds / 3)


async def wait_for_crash(scene: Scene, tap: RunningTap) -> None:
    """The tokenizer takes its process with it, and the next one too."""
    faults = scene.folder / "faults"
    while not faults.exists() or faults.stat().st_size < CRASHES:  # noqa: ASYNC110  another process's file
        await asyncio.sleep(0.05)
    await recording_goes_on(scene, tap)
    scene.done = "the tokenizer dies of SIGSEGV, and the recorder with it, twice"


def tokenizer_raised(scene: Scene, tap: RunningTap) -> None:
    """An exception costs a record its hashes, not its place in the trace."""
    scene.done = f"the tokenizer raises at every 5th prompt; records without hashes: {tap.account.get('unhashed')}"
    if not tap.account.get("unhashed") and not tap.account.get("dropped"):
        scene.problems.append("the tokenizer never failed")


async def lose_key(scene: Scene, tap: RunningTap) -> None:
    """The key file becomes unreadable, for root too; then the recorder dies and needs the key again."""
    key = scene.folder / "key"
    key.unlink()
    key.mkdir()
    recorder = await tap.pid("recorder")
    os.kill(recorder, signal.SIGKILL)
    await gone(recorder)
    await recording_goes_on(scene, tap)
    scene.done = "a directory in the key file's place, then SIGKILL to the recorder"


def with_admin(scene: Scene) -> None:
    """The admin port, and half of the sessions left out, so that the account has that side too."""
    port = free_port()
    scene.flags += ["--admin", f"127.0.0.1:{port}", "--sample", "0.5"]
    scene.admin_port = port


async def kill_admin(scene: Scene, tap: RunningTap) -> None:
    """The admin process dies, and is started again."""
    admin = await tap.pid("admin")
    os.kill(admin, signal.SIGKILL)
    await gone(admin)
    await tap.pid("admin")
    await recording_goes_on(scene, tap)
    scene.done = "SIGKILL to the admin process, which was started again"


async def hammer_admin(scene: Scene, tap: RunningTap) -> None:
    """Ask for every page as fast as it comes."""
    client = Client(Origin("http", "127.0.0.1", scene.admin_port))
    deadline = asyncio.get_running_loop().time() + scene.seconds / 3
    answered = 0

    async def ask(path: str) -> None:
        nonlocal answered
        while asyncio.get_running_loop().time() < deadline:
            exchange = await client.request("GET", path, timeout_s=10)
            answered += exchange.status == 200
            if exchange.status != 200:
                scene.problems.append(f"{path}: {exchange.outcome} {exchange.status}")
                return

    await asyncio.gather(*(ask(path) for path in ADMIN_PATHS for _ in range(ADMIN_CLIENTS)))
    await client.close()
    await recording_goes_on(scene, tap)
    scene.done = f"{answered} answers of the admin port asked for in a row, --sample 0.5"


def with_fake_clock(scene: Scene) -> None:
    """A wall clock of the tap's own, that a file steps; the monotonic one stays. Raises FaultImpossibleError."""
    found = sorted(Path("/").glob(LIBFAKETIME.lstrip("/")))
    if not found:
        raise FaultImpossibleError("libfaketime is not installed (Debian: apt-get install libfaketime)")
    step = scene.folder / "clock"
    step.write_text("+0")
    scene.environment |= {
        "LD_PRELOAD": str(found[0]),
        "FAKETIME_TIMESTAMP_FILE": str(step),
        "FAKETIME_NO_CACHE": "1",
        "FAKETIME_DONT_FAKE_MONOTONIC": "1",
        "NO_FAKE_STAT": "1",
    }


async def step_clock(scene: Scene, tap: RunningTap) -> None:
    """An hour ahead, an hour behind, and right again."""
    for step_s in CLOCK_STEPS_S:
        (scene.folder / "clock").write_text(f"{step_s:+d}")
        await asyncio.sleep(scene.seconds / 3 / len(CLOCK_STEPS_S))
    for role in ("tap", "worker", "recorder"):
        for pid in tap.pids(role):
            if "libfaketime" not in Path(f"/proc/{pid}/maps").read_text():  # noqa: ASYNC240  the kernel's, at once
                scene.problems.append(f"the {role} process did not have the stepped clock")
    await recording_goes_on(scene, tap)
    scene.done = f"the wall clock stepped by {CLOCK_STEPS_S[0]:+d} s and {CLOCK_STEPS_S[1]:+d} s (libfaketime)"


def times_are_monotonic(scene: Scene, tap: RunningTap) -> None:
    """Check that all times in the trace lie within the run."""
    for line in tap.trace.read_bytes().splitlines()[1:]:
        record = json.loads(line)
        if not 0 <= record["arrival_ms"] <= record["arrival_ms"] + record["e2e_ms"] < 60_000 + scene.seconds * 1e3:
            scene.problems.append(f"a record's times are off: {record['arrival_ms']} ms, {record['e2e_ms']} ms")


FAULTS = (
    Fault("recorder killed", kill_recorder),
    Fault("recorder hangs", stop_recorder, small_queue),
    Fault("disk full", fill_disk, small_disk, disk_was_full),
    Fault(
        "tokenizer raises",
        wait_for_errors,
        faulty_tokenizer("raise RuntimeError('a fault for a test')", every=5, times=1_000_000),
        tokenizer_raised,
    ),
    Fault(
        "tokenizer crashes",
        wait_for_crash,
        faulty_tokenizer("os.kill(os.getpid(), signal.SIGSEGV)", every=50, times=CRASHES),
    ),
    Fault("key unreadable", lose_key),
    Fault("admin hammered", hammer_admin, with_admin),
    Fault("admin killed", kill_admin, with_admin),
    Fault("clock stepped", step_clock, with_fake_clock, times_are_monotonic),
)
