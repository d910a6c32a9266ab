"""Models and workers that several files train."""

from contextlib import ExitStack

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.support.engine_in_process import in_float64
from tests.support.engine_shapes import started, with_shared_heads
from tests.support.fsdp2_workers import make_value_model
from tests.support.rows_in_queue import empty_queue
from verl_padding.on_cpu.tiny_models import make_tiny_model


@pytest.fixture(autouse=True)
def _empty_queue(request):
    """No test finds the rows of another."""
    yield
    if "transfer_queue" in request.fixturenames:
        empty_queue()


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Loads the tiny model of a kind in float64."""
    folder = tmp_path_factory.mktemp("models")

    def load(kind, auto=AutoModelForCausalLM, **settings):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)  # of a value head
            return in_float64(
                auto.from_pretrained(make_tiny_model(kind, folder), dtype=torch.float64, **settings)
            )

    return load


@pytest.fixture(scope="module")
def model_of(tmp_path_factory):
    """The model of a shape, which each rank starts from."""
    folder, found = tmp_path_factory.mktemp("models"), {}

    def model(shape):
        if shape.kind not in found:
            found[shape.kind] = with_shared_heads(make_tiny_model(shape.kind, folder))
        if shape.update == "actor":
            return found[shape.kind]
        values = folder / f"{shape.kind} values"
        return values if values.is_dir() else make_value_model(found[shape.kind], values)

    return model


@pytest.fixture(scope="module")
def one_rank_of(transfer_queue, model_of):
    """The rank without pads of a shape; shapes share it."""
    with ExitStack() as stack:
        found = {}

        def one_rank(shape):
            reference = shape.reference
            if reference not in found:
                found[reference] = stack.enter_context(started(reference, model_of(reference)))
            return found[reference]

        yield one_rank
