"""Commands of the documentation: its blocks of shell as lines, and the reason for each that no test runs."""

import re
from collections.abc import Iterator
from pathlib import Path

from kvtape.completion import PROGRAMS

ROOT = Path(__file__).parent.parent
USER_FOLDERS = (".", "docs", "docs/recipes", "deploy", "data/captures")
PAGES = sorted(path for folder in (*USER_FOLDERS, "docs/dev") for path in (ROOT / folder).glob("*.md"))
USER_PAGES = [path for path in PAGES if path.parent.name != "dev" and path.name not in ("CHANGELOG.md", "index.md")]
OUTSIDE = {
    **dict.fromkeys(("apt-get", "docker", "kubectl", "sudo", "systemctl", "systemd-analyze"), "changes the machine"),
    **dict.fromkeys(("haproxy", "nginx", "journalctl"), "wants servers of its own"),
    **dict.fromkeys(("vllm", "llama-server", "lm_eval"), "wants a real engine"),
    **dict.fromkeys(("pip", "uv", "make", "."), "sets an environment up"),
    **dict.fromkeys(("kill", "curl", "mkdir", "cd", "openssl", "echo", "python", "zstd", "cat", "export"), ""),
}
"""Programs of others that pages call, with the reason why no test runs them; empty: tests do."""
LEFT_OUT = (
    (r"python -m (sglang|scripts)\.", "starts a real engine, or measures for minutes"),
    (r"s3://|/var/lib/kvtape|/etc/kvtape", "wants a bucket or the service's folders"),
    (r"--ray\b", "starts a cluster: `make test-ray`"),
    (r"gateway\.example|sk-engine|localhost:8443|\$DOOR", "wants a gateway: tests/e2e/test_engines_doc.py"),
    (r"…", "stands for a line of the reader's"),
    (r"/tmp/door|ca\.key|door\.|users$|names$", "makes the gateway's files"),
    (r"loadgen sweep", "measures for minutes"),
    (r"kubectl|\bsudo\b", "wants a cluster, or changes the machine"),
    (r"^kill -HUP|^tap .* --admin 127\.0\.0\.2", "reads a gateway's list again: tests/tap/supervisor"),
    (r"--dialect (llamacpp|sglang)", "wants the engine's own API"),
    (r"kvtape (init|completion|doctor --config)", "looks for an engine here, or writes to the home: tests/kvtape"),
    (r"127\.0\.0\.1:9001|:9001/", "wants a tap's admin port: tests/tap/admin"),
    (r"--upstreams|--upstream \S+ --upstream|http://router:|--workers 2", "wants several engines: tests/tap"),
)
"""Command lines that no test runs, and why; their flags are parsed."""


def blocks(text: str) -> Iterator[str]:
    """Blocks of shell, without here-documents' content and indentation."""
    for indent, block in re.findall(r"^( *)```sh\n(.*?)^ *```", text, re.MULTILINE | re.DOTALL):
        yield re.sub(rf"^{indent}", "", block, flags=re.MULTILINE)


def lines(text: str) -> Iterator[str]:
    """Command lines of a page in order, each whole; comments are left out."""
    for block in blocks(re.sub(r"<<'END'.*?^ *END$", "", text, flags=re.MULTILINE | re.DOTALL)):
        for line in block.replace("\\\n", " ").splitlines():
            if plain := re.sub(r"(^|\s)#(?=\s|$).*", "", line).strip():
                yield plain


def program_of(line: str) -> str:
    """The program that a line calls first, after its variables; empty: it only sets some."""
    words = re.sub(r"""^\(?((export )?[A-Z_]+=('[^']*'|"[^"]*"|\S*)(\s+|$))*""", "", line).split()
    if words[:1] == ["kvtape"] and words[1:2] and words[1] in PROGRAMS:
        return words[1]
    return words[0] if words else ""


def reason(line: str) -> str:
    """Why no test runs a line; empty: one does."""
    if result := next((why for pattern, why in LEFT_OUT if re.search(pattern, line)), ""):
        return result
    return OUTSIDE.get(program_of(line), "")


def is_known(line: str) -> bool:
    """True for a command of ours, and for one of those that pages may call."""
    return program_of(line) in {*PROGRAMS, *OUTSIDE, "", "kvtape"}


def without_config(words: list[str]) -> list[str]:
    """Words without ``--config FILE``: a page's file is not there."""
    at = words.index("--config") if "--config" in words else len(words)
    return words[:at] + words[at + 2 :]
