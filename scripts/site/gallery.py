"""Real pages for the site, made from the committed captures and workloads: ``python -m scripts.site.gallery``.

Every page has its commands, and the commands are what makes it. They go to out/gallery; a page that is there is kept.
"""

import argparse
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from scripts.site.browser import take_picture

ROOT = Path(__file__).parent.parent.parent
HEAD = """# Gallery

After this page you have seen the HTML pages that kvtape makes, of real traffic. Each is one file that needs no network.

The captures are of a real vLLM on a CPU ([captures](../data/captures/README.md)). The agents are a workload that comes
with loadgen. `C` is `data/captures/128x2`, and `A` is `loadgen/datasets/workloads/agentic-coding.jsonl.zst`.
"""
WORDS = {"C": "data/captures/128x2", "A": "loadgen/datasets/workloads/agentic-coding.jsonl.zst"}
FIRST_PX = (1280, 1000)


@dataclass(frozen=True, slots=True)
class Shown:
    """A page: its file's name, title, use, and the commands that make it."""

    name: str
    title: str
    use: str
    commands: str


PAGES = (
    Shown(
        "calibrate",
        "Is the model right?",
        "A latency model fitted to five captures of a designed load, and its forecast of sessions that no fit saw.",
        "sim calibrate $C/calibration-?.jsonl.zst --against $C/session-fast.jsonl.zst -o model.json --overwrite"
        " \\\n  --max-num-seqs 32 --max-num-batched-tokens 2048 --html calibrate.html",
    ),
    Shown(
        "compare",
        "Captured, replayed, predicted",
        "The same requests six times: measured, measured again, replayed and forecast, with the cache and without.",
        "sim run $C/session-fast.jsonl.zst --latency-model model.json --replay-sessions"
        " -o predicted.jsonl.zst --overwrite\n"
        "sim run $C/session-fast.jsonl.zst --latency-model model.json --replay-sessions --cold-prompts"
        " -o cold-predicted.jsonl.zst --overwrite\n"
        "report compare captured=$C/session-fast.jsonl.zst again=$C/session-fast-again.jsonl.zst"
        " \\\n  replayed=$C/session-fast-replayed.jsonl.zst cold-replayed=$C/session-fast-cold-replayed.jsonl.zst"
        " \\\n  predicted=predicted.jsonl.zst cold-predicted=cold-predicted.jsonl.zst"
        " --truth cold-predicted=cold-replayed --html compare.html",
    ),
    Shown(
        "what-if",
        "What would another cache bring?",
        "The capture at three cache sizes, each an ensemble of forecasts.",
        "sim what-if $C/session-fast.jsonl.zst --latency-model model.json --num-gpu-blocks 500,700,1000 --members 16"
        " \\\n  --html what-if.html",
    ),
    Shown(
        "show",
        "One capture",
        "Worth of the cache, TTFT by cohort, sessions, the workload's shape and health checks.",
        "report show $C/session-fast.jsonl.zst --html show.html",
    ),
    Shown(
        "cache",
        "Whose prefixes fill the cache?",
        "Hits at every cache size, causes of misses, and times between uses, of coding agents.",
        "sim curve $A --block-size 512 --by prefix --json > hits.json\n"
        "sim misses $A --block-size 512 --num-gpu-blocks 2001 --by prefix --json > misses.json\n"
        "sim reuse $A --block-size 512 --json > reuse.json\n"
        "report curve hits.json misses.json reuse.json --html cache.html",
    ),
    Shown(
        "evict",
        "Which eviction policy?",
        "Hits by size under four policies, beside Belady's bound.",
        "sim curve $A --block-size 512 --evict lfu,slru,ttl --json > evict.json\n"
        "report curve evict.json --html evict.html",
    ),
    Shown(
        "sweep",
        "Which setting is the cheapest?",
        "Forecasts over a grid of cache sizes and routers: the Pareto set, the knee and the choice.",
        "sim sweep data/grids/gallery.toml $C/session-fast.jsonl.zst --latency-model model.json --slo 'ttft.p90<=2s'"
        " \\\n  --gpu-price 2.5 -o sweep.parquet --members 4 --overwrite --html sweep.html",
    ),
    Shown(
        "loads",
        "Many captures by load",
        "Throughput and latency of the same traffic with the cache, without it, and with prompts that share nothing.",
        "report sweep data/captures/128x2 data/captures/256x4 --html loads.html",
    ),
)


def make_page(shown: Shown, folder: Path) -> None:
    """Run a page's commands in ``folder``, and take its picture where there is a browser."""
    for name in ("data", "loadgen"):
        if not (folder / name).exists():
            (folder / name).symlink_to(ROOT / name)
    path = os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)))
    environment = {**os.environ, **WORDS, "PATH": path, "PYTHONPATH": str(ROOT)}
    subprocess.run(["bash", "-euo", "pipefail", "-c", shown.commands], cwd=folder, env=environment, check=True)
    take_picture((folder / f"{shown.name}.html").as_uri(), folder / f"{shown.name}.png", *FIRST_PX)


def make_gallery(folder: Path) -> None:
    """Make the pages that ``folder`` lacks. Later pages use files of earlier ones."""
    folder.mkdir(parents=True, exist_ok=True)
    for shown in PAGES:
        if not (folder / f"{shown.name}.html").exists():
            print(f"gallery: {shown.name}.html", flush=True)
            make_page(shown, folder)


def section(shown: Shown, folder: Path) -> str:
    """A page's part of the gallery."""
    page, image = f"gallery/{shown.name}.html", f"gallery/{shown.name}.png"
    picture = f"[![{shown.title}]({image})]({page})\n\n" if (folder / f"{shown.name}.png").exists() else ""
    return f"## {shown.title}\n\n{shown.use} [Open the page]({page}).\n\n{picture}```sh\n{shown.commands}\n```\n"


def gallery_page(folder: Path) -> str:
    """The gallery as Markdown; pages that ``folder`` lacks are made."""
    make_gallery(folder)
    return "\n".join([HEAD, *(section(shown, folder) for shown in PAGES)])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Make the pages of the gallery.")
    parser.add_argument("folder", type=Path, nargs="?", default=ROOT / "out" / "gallery")
    make_gallery(parser.parse_args().folder)
