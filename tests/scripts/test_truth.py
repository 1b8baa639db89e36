"""The comparison of a known engine with its fit."""

import msgspec
import pytest

from scripts.truth import SocketPath, compare, known_engine
from sim.latency.modelfile import Model, Parameter


def found(**changes: Parameter | None) -> Model:
    """The known engine's model, as a fit might have it; null: without that term."""
    kept = {**known_engine().parameters, **changes}
    return msgspec.structs.replace(known_engine(), parameters={name: one for name, one in kept.items() if one})


def test_a_parameter_is_found_within_five_per_cent_or_inside_its_interval() -> None:
    step = known_engine().parameters["rested_step_ms"]
    near = msgspec.structs.replace(step, value=step.value * 1.04)
    far = msgspec.structs.replace(step, value=step.value * 1.2)
    held = msgspec.structs.replace(far, low=step.value * 0.9, high=step.value * 1.5)
    assert [compare(known_engine(), found(rested_step_ms=one)) for one in (near, held, far, None)] == [0, 0, 1, 1]


def test_sockets_are_part_of_the_truth(capsys: pytest.CaptureFixture[str]) -> None:
    truth = SocketPath(base_ms=0.4, per_token_ms=0.0001).added_to(known_engine())
    assert truth.parameters["frontend_base_ms"].value == pytest.approx(7.4)
    assert truth.parameters["frontend_ms_per_prompt_token"].value == pytest.approx(0.0023)
    assert compare(truth, known_engine()) == 1
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines() if "MISSED" in line] == [
        "frontend_base_ms"
    ]
