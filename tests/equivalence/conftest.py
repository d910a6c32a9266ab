"""Workers that several files train; tests/conftest.py has one process of tests run these files."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from verl.single_controller.ray import RayWorkerGroup

from tests.equivalence.updates import ALL_TERMS, BUDGETS
from tests.support.fsdp2_workers import empty_queue, follow_no_plan, padded_and_plain, start_actor, stop
from verl_padding.local.tiny_models import make_tiny_model
from verl_padding.worker.losses import wrap_worker_loss
from verl_padding.worker.plan_packer import install


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
    """Two ranks that get pads, and one that does not; they begin with verl's packer."""
    yield started_actors
    started_actors[0].execute_with_func_generator(follow_no_plan)
    empty_queue()


@pytest.fixture(scope="module")
def four_ranks(transfer_queue, qwen2) -> Iterator[RayWorkerGroup]:
    """Four ranks that get pads, and cut their micro-batches as the plan says where it says it."""
    ranks = start_actor(qwen2, 4, *ALL_TERMS, *BUDGETS)
    ranks.execute_with_func_generator(wrap_worker_loss("rows"))
    ranks.execute_with_func_generator(install())
    yield ranks
    stop(ranks)
