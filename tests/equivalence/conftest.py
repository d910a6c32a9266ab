"""Workers that several files train; tests/conftest.py has one process of tests run these files."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from verl.single_controller.ray import RayWorkerGroup

from tests.equivalence.updates import ALL_TERMS, BUDGETS
from tests.support.fsdp2_workers import empty_queue, padded_and_plain, start_actor
from verl_padding.local.tiny_models import make_tiny_model


@pytest.fixture(scope="session")
def qwen2(tmp_path_factory) -> Path:
    """A model's folder; nobody writes into it."""
    return make_tiny_model("qwen2", tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="package")
def started_actors(transfer_queue, qwen2) -> Iterator[tuple[RayWorkerGroup, RayWorkerGroup]]:
    with padded_and_plain(start_actor, qwen2, *ALL_TERMS, padded=BUDGETS) as both:
        yield both


@pytest.fixture(scope="module")
def actors(started_actors) -> Iterator[tuple[RayWorkerGroup, RayWorkerGroup]]:
    """Two ranks that get pads, and one that does not. Who puts more into them takes it out again."""
    yield started_actors
    empty_queue()
