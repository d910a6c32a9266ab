"""What the engines that replay routes make of those of pads: their own code, on rows and pads out
of TransferQueue."""

import ast
from pathlib import Path

import pytest
import torch
import transfer_queue as tq
import verl
from verl.utils.veomni.router_replay import VeOmniRouterReplay

from tests.support.padded_rows import plan_for, upsample
from tests.support.rows_in_queue import PARTITION, put_rows
from verl_padding.pads.template import PadTemplate

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("empty_queue")]

LAYERS, TOP_K, EXPERTS = 3, 2, 8
LENGTHS = [(5, 3), (7, 2), (4, 9)]


@pytest.fixture
def micro_batch():
    """A mini-batch of rows and pads as a worker gets it."""
    draw = torch.Generator().manual_seed(0)
    routes = [
        torch.rand(sum(length), LAYERS, EXPERTS, generator=draw).topk(TOP_K).indices.to(torch.int16)
        for length in LENGTHS
    ]
    batch = put_rows(LENGTHS, routed_experts=routes)
    template = PadTemplate(eos_token_id=3, length=4, n_experts=lambda: EXPERTS)
    padded = upsample(batch, plan_for(batch), template)
    rows = padded.update_call("actor", batch)
    data = tq.kv_batch_get(keys=rows.keys, partition_id=PARTITION)
    assert data["is_padding"].any()
    assert not data["is_padding"].all()
    return data


def test_veomnis_replay_gathers_the_scores_of_distinct_experts(micro_batch):
    # workers/engine/veomni/transformer_impl.py, _prepare_router_replay_inputs;
    # utils/veomni/router_replay.py
    targets = micro_batch["routed_experts"].values().to(torch.int64)
    assert len(targets) == len(micro_batch["input_ids"].values())
    replay = VeOmniRouterReplay()
    replay.begin_replay()
    replay.begin_microbatch(targets=list(targets.unbind(dim=1)))
    routers = [torch.nn.Identity() for _ in range(LAYERS)]  # told apart by their id
    for router in routers:
        scores = torch.rand(len(targets), EXPERTS).softmax(-1)
        replayed = replay.on_router_forward(router, scores, scores.topk(TOP_K).indices)
        assert scores.gather(1, replayed).shape == (len(targets), TOP_K)
        assert all(len(set(experts)) == TOP_K for experts in replayed.tolist())
    assert replay.num_fired == replay.num_targets == LAYERS


def test_megatrons_replay_takes_the_routes_of_pads(micro_batch):
    # utils/megatron/router_replay_utils.py needs Megatron to be imported; these functions of it do
    # not.
    align = function_of("utils/megatron/router_replay_utils.py", "align_r3_router_replay_data")
    mask = function_of("utils/megatron/router_replay_utils.py", "build_r3_replay_mask")
    routes = align(micro_batch["routed_experts"], micro_batch["input_ids"])
    assert routes.values().shape == (len(micro_batch["input_ids"].values()), LAYERS, TOP_K)
    replayed = mask(micro_batch["input_ids"], micro_batch["response_mask"].to_padded_tensor(0))
    for row, is_pad in zip(replayed.unbind(), micro_batch["is_padding"].tolist(), strict=True):
        assert bool(row.any()) == (not is_pad)


def function_of(path: str, name: str):
    """A function of an installed file of verl, without importing the file."""
    tree = ast.parse((Path(verl.__file__).parent / path).read_text())
    [definition] = [
        node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == name
    ]
    namespace = {"torch": torch}
    exec(compile(ast.Module([definition], []), path, "exec"), namespace)
    return namespace[name]
