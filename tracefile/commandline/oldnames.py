"""Names of earlier commits and their names now. A command refuses an old name with one line that says the new one."""

from collections.abc import Mapping
from typing import Final

FLAGS: Final[Mapping[str, str]] = {
    "--aa": "--repeat",
    "--balance": "--route",
    "--beside": "--also",
    "--blocks": "--num-gpu-blocks, which counts the null block too: one more",
    "--burst-every-s": "--burst-every",
    "--drain-s": "--drain",
    "--engine-metrics-s": "--engine-metrics-interval",
    "--f0-ms": "--frontend-base-ms",
    "--f1-ms-per-prompt-token": "--frontend-ms-per-prompt-token",
    "--cohort": "--target, as in --target 'turns2+.ttft.p90<=500ms'",
    "--highest": "--maximize",
    "--kv-blocks": "--num-gpu-blocks",
    "--least-exact": "--min-exact-share",
    "--model": "--latency-model",
    "--no-splice": "--no-output-substitution",
    "--rotate-s": "--rotate-age",
    "--seconds": "--duration",
    "--served-model-name": "--model",
    "--smallest": "--minimize",
    "--step-s": "--step-duration",
    "--think-s": "--think",
    "--timeout-s": "--timeout",
    "--times": "--scale",
    "--trace": "-o/--output",
    "--ttft": "--target, as in --target 'ttft.p90<=500ms'",
    "--wait-s": "--wait",
    "--window-s": "--window",
    "-o": "--html",
    "sim calibrate --model": "sim calibrate fits now; sim validate compares a capture with forecasts",
}
"""New flag by old one, for every command that has the new one and not the old one.

A key ``COMMAND --flag`` is for one command only, and its text is shown as it is."""

COMMANDS: Final[Mapping[str, str]] = {
    "loadgen calibrate": "loadgen selftest",
}
"""New command by old one, both with the program's name."""

VALUES: Final[Mapping[tuple[str, str], str]] = {
    ("--dialect", "llama.cpp"): "llamacpp",
    ("--dialect", "tensorrt-llm"): "trtllm",
    ("--maximize", "kv-blocks"): "num-gpu-blocks",
    ("--minimize", "kv-blocks"): "num-gpu-blocks",
    ("--pattern", "calibrate"): "calibration",
}
"""New value by flag and old value."""
