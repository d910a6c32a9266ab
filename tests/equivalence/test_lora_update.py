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

from tests.equivalence.updates import ALL_TERMS, BUDGETS, MODES, assert_updates_agree
from tests.support.fsdp2_workers import padded_and_plain, start_actor, start_over, weights_of

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


def adapter_settings(adapter: Path) -> list[str]:
    model = "actor_rollout_ref.model"
    return [f"{model}.lora_rank={RANK}", f"+{model}.lora_adapter_path={adapter}"]


@pytest.fixture(scope="module")
def adapted(transfer_queue, qwen2, tmp_path_factory) -> Iterator[tuple[RayWorkerGroup, RayWorkerGroup]]:
    """Two ranks that get pads, and one that does not."""
    adapter = adapter_settings(make_adapter(qwen2, tmp_path_factory.mktemp("adapter")))
    with padded_and_plain(start_actor, qwen2, *ALL_TERMS, *adapter, padded=BUDGETS) as both:
        yield both


@pytest.mark.parametrize("mode", MODES)
def test_two_padded_ranks_end_with_the_adapters_of_one_rank_without_pads(mode, adapted):
    for workers in adapted:
        start_over(workers, mode)
    before = weights_of(adapted[0])
    assert_updates_agree(*adapted, mode=mode)
    moved = (weights_of(adapted[0]) != before).float().mean()
    assert 0 < moved < 0.5, "only the adapters were meant to move"


def _names_of_weights(worker: Any) -> DataProto:
    # As its update_weights() asks for them where the rollout is another process, as in separate_async.
    weights, _ = worker.actor.engine.get_per_tensor_param()
    return DataProto(non_tensor_batch={"names": np.array([name for name, _ in weights], dtype=object)})


def test_verl_still_sends_other_processes_no_adapter(adapted):
    # When this fails, verl sends it: refuse_unmerged_adapter() may let separate_async pass.
    names = adapted[1].execute_with_func_generator(_names_of_weights).non_tensor_batch["names"]
    assert len(names) > 10
    assert not [name for name in names if "lora_" in name]
