"""Install and run a real SGLang on this machine's CPU: a random-weight model, a real scheduler, a real radix cache.

    python -m scripts.sglang_engine install            # once: three minutes and 3.4 GB in the user's cache directory
    python -m scripts.sglang_engine serve --port 8000  # until Ctrl-C; more flags of SGLang: --page-size 16
    python -m scripts.sglang_engine test [PYTEST ARGS] # its tests, with a new server

SGLang is built for CUDA. With a CPU build of torch, PyTorch's attention and without its other dependencies, its Python
code runs on any CPU; two packages without CPU builds are imported but never called, and are replaced by stubs.
"""

import os
import platform
import subprocess
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path

from scripts import vllm_engine
from scripts.engine_home import EngineActions, EngineHome, act, engine_parser
from scripts.processes import free_port
from scripts.vllm_engine import ModelShape

HOME = EngineHome("sglang", "SGLang")
TORCH = ["torch==2.13.0+cpu", "numpy"]
SGLANG = "sglang==0.5.23"
DEPENDENCIES = [
    *("aiohttp", "fastapi", "uvicorn", "uvloop", "orjson", "msgspec", "pyzmq", "psutil", "pydantic", "requests"),
    *("prometheus-client", "setproctitle", "python-multipart", "partial_json_parser", "interegular", "einops"),
    *("easydict", "blobfile", "compressed-tensors", "transformers==5.19.0", "tokenizers==0.23.2", "tiktoken"),
    *("sentencepiece==0.2.1", "xxhash", "zstandard", "IPython", "pybase64", "gguf", "pillow", "scipy", "dill", "tqdm"),
    *("xgrammar==0.2.7", "llguidance>=1.7.6,<2", "openai==2.8.0", "openai-harmony==0.0.4", "anthropic>=0.20"),
    *("mistral_common", "datasets", "modelscope", "soundfile", "nvidia-ml-py", "torch_memory_saver", "watchfiles"),
    *("apache-tvm-ffi==0.1.11", "numba==0.65.1", "packaging", "regex"),
]
STUBS = '''"""Empty modules for packages without CPU builds, which a text model imports but never calls."""

import sys
from importlib.machinery import ModuleSpec
from types import ModuleType

PACKAGES = {"sgl_kernel", "torchvision"}


class AnyAttribute(type):
    """Metaclass: every attribute of a class is its name."""

    def __getattr__(cls, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return name


class Stub(ModuleType):
    __path__ = ()
    __version__ = "0.0"

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return AnyAttribute(name, (), {})


class Finder:
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return ModuleSpec(name, cls, is_package=True) if name.partition(".")[0] in PACKAGES else None

    @staticmethod
    def create_module(spec):
        return Stub(spec.name)

    @staticmethod
    def exec_module(module):
        pass


sys.meta_path.append(Finder)
'''


def install(shape: ModelShape) -> None:
    if not HOME.is_installed():
        if sys.platform != "linux" or platform.machine() != "x86_64":
            sys.exit("SGLang on a CPU is for Linux on x86-64; the embedded engine (make demo) runs anywhere")
        HOME.make_environment("about three minutes and 3.4 GB", install_packages)
    if not (shape.directory / "config.json").exists():
        vllm_engine.make_model(shape)


def install_packages(pip: Sequence[str]) -> None:
    """Install SGLang without dependencies, then the dependencies with CPU builds, and the stubs."""
    vllm_engine.install_with_torch(pip, TORCH)
    subprocess.run([*pip, "install", "--no-deps", SGLANG], check=True)
    subprocess.run([*pip, "install", *DEPENDENCIES], check=True)
    write_stubs()


def write_stubs() -> None:
    """Install the stubs in the environment; its Python loads them at every start."""
    code = "import sysconfig; print(sysconfig.get_path('purelib'))"
    result = subprocess.run([HOME.python, "-c", code], check=True, capture_output=True, text=True)
    packages = Path(result.stdout.strip())
    (packages / "stubs_for_cpu.py").write_text(STUBS)
    (packages / "stubs_for_cpu.pth").write_text("import stubs_for_cpu\n")


def server_command(shape: ModelShape, port: int, extra: Sequence[str]) -> list[str]:
    return [
        *(str(HOME.python), "-m", "sglang.launch_server"),
        *("--model-path", str(shape.directory), "--served-model-name", "tiny", "--load-format", "dummy"),
        *("--device", "cpu", "--attention-backend", "torch_native", "--host", "127.0.0.1", "--port", str(port)),
        *("--mem-fraction-static", "0.3", "--max-total-tokens", "60000", "--context-length", "16384"),
        *("--skip-server-warmup", "--enable-cache-report", "--enable-metrics", "--sleep-on-idle"),
        *extra,
    ]


def running_sglang(
    shape: ModelShape, log: Path, *, port: int = 0, extra: Sequence[str] = ()
) -> AbstractContextManager[str]:
    """Run SGLang within the ``with`` block and yield its base URL; its output goes to ``log``."""
    # Without the last variable, SGLang uses vLLM's CUDA kernels for the unknown device.
    environment = {"HF_HUB_OFFLINE": "1", "DO_NOT_TRACK": "1", "OMP_NUM_THREADS": "1", "SGLANG_USE_CPU_ENGINE": "1"}
    port = port or free_port()
    return HOME.serving(server_command(shape, port, extra), os.environ | environment, log, port)


def main() -> int:
    args, extra = engine_parser(__doc__, HOME).parse_known_args()
    shape = ModelShape()

    def actions(*more: str) -> EngineActions:
        return EngineActions(
            home=HOME,
            install=lambda: install(shape),
            running=lambda log, port, extra: running_sglang(shape, log, port=port, extra=(*extra, *more)),
            marker="engines or sglang",
            variable="KVTAPE_SGLANG_URL",
            tests=[
                *("tests/e2e/test_sglang.py", "tests/sim/sglang/test_sglang_oracle.py"),
                *("tests/engines/test_real_sglang.py", "tests/e2e/test_chats.py"),
            ],
            test_environment={"KVTAPE_SGLANG": str(HOME.python), "SGLANG_USE_CPU_ENGINE": "1"},
        )

    if args.action != "test":
        return act(actions(), args, extra)
    # Page size 1, SGLang's default, and the block size of traces.
    return act(actions(), args, extra) or act(actions("--page-size", "16"), args, extra)


if __name__ == "__main__":
    sys.exit(main())
