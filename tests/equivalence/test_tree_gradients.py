"""Rows that begin alike and part, computed once up to there, give in float64 what each row gives
alone."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from transformers import (
    AutoModelForTokenClassification,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
)
from verl.utils import tensordict_utils as tu

from tests.equivalence.test_shared_gradients import CASES as SHARED_CASES
from tests.equivalence.test_shared_gradients import (
    THROUGH_FLOAT32,
    assert_same_gradients,
    checkpointed,
    plain_gradients,
    plan_of,
    shared_gradients,
    taught_fields,
)
from tests.support.branching_rows import branching_rows
from tests.support.engine_in_process import (
    COMMON,
    Actor,
    Critic,
    Row,
    Whole,
    in_float64,
    loss_tokens,
    micro_batch_of,
    start_engine,
    trained_rows,
)
from tests.support.loss_comparisons import DISTILLING, POLICY_LOSSES, seeded
from tests.support.losses_on_rows import MODES, critic_loss, distilling_loss, policy_loss
from tests.support.tolerance import RELATIVE_FLOAT32, RELATIVE_FLOAT64
from verl_padding.errors import PaddingError
from verl_padding.prefix_sharing.attention import GatherTokens
from verl_padding.prefix_sharing.engine import find_tree
from verl_padding.prefix_sharing.tree import TREE
from verl_padding.worker.losses import RealRowsLoss, normalize_over_mini_batch

SMALL = {
    "vocab_size": 259,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
}


@pytest.fixture(scope="module")
def rows():
    return list(trained_rows(branching_rows()).values())


def drawn(make: Callable[[], nn.Module]) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return in_float64(make())


def grouped_heads(_models: Any) -> nn.Module:
    return drawn(lambda: LlamaForCausalLM(LlamaConfig(**SMALL)))


def sliding_window(_models: Any) -> nn.Module:
    config = Qwen2Config(**SMALL, use_sliding_window=True, sliding_window=4, max_window_layers=1)
    assert set(config.layer_types) == {"full_attention", "sliding_attention"}
    return drawn(lambda: Qwen2ForCausalLM(config))


def micro_batch(rows: list[Row], of: list[Row], *, shared: bool = False, **said: Any) -> Any:
    """Some rows as one micro-batch of a mini-batch of the rows ``of``."""
    data = micro_batch_of(rows)
    shape = {"dp_size": 1, "batch_num_tokens": loss_tokens(of), "global_batch_size": len(of)}
    tu.assign_non_tensor(data, **COMMON | shape | said)
    if shared:
        tree = find_tree(data, branches=True)
        assert tree.branches
        assert tree.tokens < 0.7 * sum(len(row["input_ids"]) for row in rows)
        tu.assign_non_tensor_data(data, TREE, tree)
    return data


def gradient(engine: Whole, loss: Any, micro_batches: list[Any]) -> torch.Tensor:
    for data in micro_batches:
        engine.backward(data, loss)
    return engine.take_gradient()


def assert_same(got: torch.Tensor, want: torch.Tensor, tolerance: float = RELATIVE_FLOAT64) -> None:
    assert want.norm() > 1e-3
    assert (got - want).norm() / want.norm() <= tolerance


CASES = SHARED_CASES | {
    "grouped heads": (grouped_heads, {}, {}),
    "a sliding window": (sliding_window, {}, {}),
    "gradient checkpointing, a sliding window": (
        lambda models: checkpointed(sliding_window(models)),
        {},
        {},
    ),
    "a critic": (
        lambda models: models("qwen2", AutoModelForTokenClassification, num_labels=1),
        {},
        {"calculate_entropy": False},
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_rows_that_part_give_the_outputs_and_gradients_of_each_row_alone(name, models, rows):
    make_model, settings, said = CASES[name]
    both = make_model(models), make_model(models)
    kind, loss = (Critic, critic_loss) if name == "a critic" else (Actor, policy_loss)
    tolerance = RELATIVE_FLOAT32 if name in THROUGH_FLOAT32 else RELATIVE_FLOAT64
    loss = normalize_over_mini_batch(loss("seq-mean-token-mean"))
    sharing, plain = start_engine(kind, both[0], shares=True, **settings), kind(both[1], **settings)
    together, alone = (
        micro_batch(rows, rows, shared=True, **said),
        [micro_batch([row], rows, **said) for row in rows],
    )
    assert_same(gradient(sharing, loss, [together]), gradient(plain, loss, alone), tolerance)
    with torch.no_grad():
        got = sharing.forward_step(together, None, True)[1]["model_output"]
        want = [plain.forward_step(data, None, True)[1]["model_output"] for data in alone]
    for output, values in got.items():
        for shared, each in zip(values.unbind(), want, strict=True):
            # The last output of a row belongs to no token.
            torch.testing.assert_close(
                shared[:-1], each[output].values()[:-1], rtol=1e2 * tolerance, atol=tolerance
            )


@pytest.fixture(scope="module")
def engines(models):
    return start_engine(Actor, models("qwen2"), shares=True), Actor(models("qwen2"))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_a_registered_loss_gives_the_gradient_of_rows_that_share_nothing(name, mode, engines, rows):
    loss = seeded(policy_loss(mode, name))
    got, want = (
        gradient(engine, loss, [micro_batch(rows, rows, shared=shared)])
        for engine, shared in zip(engines, (True, False), strict=True)
    )
    assert_same(got, want)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("ranks", [4, 5])
def test_a_plan_of_trees_with_pads_gives_the_gradients_of_rows_alone(mode, ranks, engines):
    rows = trained_rows(branching_rows(prompts=4, rollouts=2, turns=(4, 5), system=0))
    plan = plan_of(rows, ranks)
    loss = policy_loss(mode, "vanilla")
    got = shared_gradients(engines[0], rows, plan, RealRowsLoss(loss, "rows"))
    assert_same_gradients(got, plain_gradients(engines[1], rows, plan, loss))


@pytest.mark.parametrize(("name", "policy_gradient"), DISTILLING)
def test_so_does_a_distilling_loss_whose_teacher_is_cut_with_the_rows(
    name, policy_gradient, engines
):
    loss = distilling_loss("token-mean", name, policy_gradient=policy_gradient)
    use_topk = loss.keywords["distillation_config"].distillation_loss.loss_settings.use_topk
    rows = trained_rows(branching_rows(prompts=4, rollouts=2, turns=(4, 5), system=0))
    for row in rows.values():
        row.update(taught_fields(len(row["input_ids"]), use_topk=use_topk))
    plan, said = plan_of(rows, 4), {"distillation_use_topk": use_topk}
    got = shared_gradients(engines[0], rows, plan, RealRowsLoss(loss, "rows"), **said)
    want = plain_gradients(engines[1], rows, plan, loss, **said)
    assert_same_gradients(got, want, RELATIVE_FLOAT32 if use_topk else RELATIVE_FLOAT64)


@pytest.mark.parametrize("branches", [8, 32, 128])
def test_gradients_of_many_branches_add_up_in_float32(branches):
    exact = (
        torch.randn(branches, 64, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        + 1
    )
    states = torch.zeros(1, 64, dtype=torch.bfloat16, requires_grad=True)
    gathered = GatherTokens.apply(states, 0, torch.zeros(branches, dtype=torch.int64))
    gathered.backward(exact.to(torch.bfloat16))
    want = exact.to(torch.bfloat16).double().sum(0)
    assert ((states.grad[0].double() - want) / want).abs().max() <= torch.finfo(
        torch.bfloat16
    ).eps / 2 * 1.01


def test_a_layer_that_attends_in_another_way_ends_the_job(models, rows):
    model = models("qwen2")
    model.config._attn_implementation = "eager"
    with pytest.raises(PaddingError, match="the others mix branches"):
        start_engine(Actor, model, shares=True).forward_step(
            micro_batch(rows, rows, shared=True), None, True
        )


def test_a_sliding_window_that_only_the_mask_has_ends_the_job(rows):
    experts = {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 32}
    window = {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 0}
    config = Qwen2MoeConfig(**SMALL, **experts, **window)
    model = Qwen2MoeForCausalLM(config)
    with pytest.raises(PaddingError, match=r"sliding window in a mask alone.*eager"):
        start_engine(Actor, model, shares=True).forward_step(
            micro_batch(rows, rows, shared=True), None, True
        )
