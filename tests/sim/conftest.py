"""What tests of ``sim`` share : the slow engine, and synthetic captures."""

from types import ModuleType

import pytest

from tests.sim import captured_loads as captured_loads_module
from tests.sim import planned as planned_module
from tests.sim import synthetic as synthetic_module
from tests.sim.oracles import slow_engine as slow_engine_module
from tests.sim.oracles import slow_radix as slow_radix_module


@pytest.fixture(scope="session")
def slow_engine() -> ModuleType:
    return slow_engine_module


@pytest.fixture(scope="session")
def slow_radix() -> ModuleType:
    return slow_radix_module


@pytest.fixture(scope="session")
def synthetic() -> ModuleType:
    return synthetic_module


@pytest.fixture(scope="session")
def captured_loads() -> ModuleType:
    return captured_loads_module


@pytest.fixture(scope="session")
def planned() -> ModuleType:
    return planned_module
