"""Zero effect on adapters (LoRA): two padded ranks end with those of one rank that never saw a pad."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM
from verl.protocol import DataProto
from verl.single_controller.ray import RayWorkerGroup

from tests.equivalence.updates import BUDGET, update_both
from tests.support.fsdp2_workers import padded_and_plain, start_actor, start_over, weights_of
from tests.support.tolerance import ADAM_EPS, RELATIVE_METRIC
from verl_padding.local.tiny_models import make_tiny_model

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.usefixtures("transfer_queue")]

RANK = 4


def make_adapter(model: Path, folder: Path) -> Path:
    """An adapter with weights other than zero, on all linear layers."""
    config = LoraConfig(task_type="CAUSAL_LM", r=RANK, lora_alpha=8, target_modules="all-linear")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        adapted = get_peft_model(AutoModelForCausalLM.from_pretrained(model), config)
        for name, parameter in adapted.named_parameters():
            if "lora_" in name:
                torch.nn.init.normal_(parameter, std=0.05)
    adapted.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def actors(transfer_queue, tmp_path_factory) -> Iterator[tuple[RayWorkerGroup, RayWorkerGroup]]:
    """Two ranks that get pads, and one that does not."""
    folder = tmp_path_factory.mktemp("model")
    model = make_tiny_model("qwen2", folder)
    overrides = (
        f"actor_rollout_ref.model.lora_rank={RANK}",
        f"+actor_rollout_ref.model.lora_adapter_path={make_adapter(model, folder / 'adapter')}",
        f"+actor_rollout_ref.actor.optim.{ADAM_EPS}",
    )
    budget = f"actor_rollout_ref.actor.ppo_max_token_len_per_gpu={BUDGET}"
    with padded_and_plain(start_actor, model, *overrides, padded=[budget]) as both:
        yield both


@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-sum"])
def test_two_padded_ranks_end_with_the_adapters_of_one_rank_without_pads(mode, actors):
    for workers in actors:
        start_over(workers, mode)
    before = weights_of(actors[0])
    both = update_both(*actors)
    plain = [step["grad_norm"][0] for step in both.plain]
    np.testing.assert_allclose(both.padded["grad_norm"], plain, rtol=RELATIVE_METRIC, atol=5e-7)
    moved = (weights_of(actors[0]) != before).float().mean()
    assert 0 < moved < 0.5, "only the adapters were meant to move"


def _names_of_weights(worker: Any) -> DataProto:
    # As its update_weights() asks for them where the rollout is another process, as in separate_async.
    weights, _ = worker.actor.engine.get_per_tensor_param()
    return DataProto(non_tensor_batch={"names": np.array([name for name, _ in weights], dtype=object)})


def test_verl_still_sends_other_processes_no_adapter(actors):
    # When this fails, verl sends it: refuse_unmerged_adapter() may let separate_async pass.
    names = actors[1].execute_with_func_generator(_names_of_weights).non_tensor_batch["names"]
    assert len(names) > 10
    assert not [name for name in names if "lora_" in name]
