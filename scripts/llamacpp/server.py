"""Serve a GGUF model with llama.cpp's HTTP server (slots, prefix cache) from the wheel xllamacpp.

    python server.py MODEL.gguf PORT [--slots 4] [--no-slot-save-path] ...

Runs in llama.cpp's environment. Flags have the names of ``llama-server``.
"""

import argparse
import signal
import tempfile

import xllamacpp


def parsed() -> argparse.Namespace:
    """Parse the port and the settings of the prefix cache."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("port", type=int)
    parser.add_argument("--parallel", type=int, default=4, help="slots: concurrent requests, each with a prompt cache")
    parser.add_argument("--ctx-size", type=int, default=32_768, help="total tokens of all slots")
    parser.add_argument("--cache-ram", type=int, default=8192, help="MiB of prompts in host memory; 0: none")
    parser.add_argument("--slot-prompt-similarity", type=float, default=None)
    parser.add_argument("--kv-unified", action=argparse.BooleanOptionalAction, default=None)
    parser.add_argument("--cache-idle-slots", action=argparse.BooleanOptionalAction, default=None)
    parser.add_argument("--metrics", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--slot-save-path", action=argparse.BooleanOptionalAction, default=True)
    return parser.parse_args()


def parameters(args: argparse.Namespace) -> "xllamacpp.CommonParams":
    """Return the settings of the server: one compute thread, loopback, no web page."""
    params = xllamacpp.CommonParams()
    params.model.path = args.model
    params.model_alias = {"tiny"}
    params.hostnames = ["127.0.0.1"]
    params.port = args.port
    params.n_parallel = args.parallel
    params.n_ctx = args.ctx_size
    params.cache_ram_mib = args.cache_ram
    params.cpuparams.n_threads = 1
    params.cpuparams_batch.n_threads = 1
    params.endpoint_metrics = args.metrics
    params.endpoint_slots = True
    params.ui = False
    if args.slot_save_path:
        params.slot_save_path = tempfile.mkdtemp() + "/"
    for name in ("slot_prompt_similarity", "kv_unified", "cache_idle_slots"):
        if getattr(args, name) is not None:
            setattr(params, name, getattr(args, name))
    return params


def main() -> None:
    server = xllamacpp.Server(parameters(parsed()))
    print("listening on", server.listening_address, flush=True)
    signal.sigwait({signal.SIGTERM, signal.SIGINT})


if __name__ == "__main__":
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT})
    main()
