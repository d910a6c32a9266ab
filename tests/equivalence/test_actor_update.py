"""Zero effect on real workers: two padded ranks end with the weights of one rank that never saw a pad.

The reference has no pads and no layout: one FSDP2 rank, verl's own loss, the real rows of each mini-batch in one call,
and in one micro-batch, with their number as ``global_batch_size``. Both sides start from the same weights and take the
same AdamW steps.
"""

from collections.abc import Iterator

import numpy as np
import pytest
import torch
import transfer_queue as tq
from tensordict import TensorDict
from transfer_queue import KVBatchMeta
from verl.single_controller.ray import RayWorkerGroup

from tests.equivalence.actor_workers import start_actor, start_over, stop, weights_of
from tests.pads.rows_in_queue import PARTITION, put_rows, queue_content
from tests.tolerance import RELATIVE_FLOAT32, RELATIVE_METRIC
from verl_padding.local.tiny_models import make_tiny_model
from verl_padding.pads.padded_batch import strip, upsample
from verl_padding.pads.template import PadTemplate
from verl_padding.plan import BatchPlan, Job, Pass, Rows, Update, plan_batch
from verl_padding.trainer.losses import MICRO_BATCHES, PACKING_EFFICIENCY, wrap_worker_loss
from verl_padding.trainer.plan_packer import install_in_worker
from verl_padding.trainer.worker_calls import PaddedWorkerGroup

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("transfer_queue")]

LENGTHS = [(9, 5), (14, 2), (4, 12), (6, 1), (20, 9), (8, 8), (5, 3), (11, 4), (3, 3), (17, 6), (6, 2)]
EPOCHS = 2
SEQ_MEAN_MODES = ["seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]
BUDGET = 32


def put_trained_rows() -> KVBatchMeta:
    """Rows with all that an actor update reads."""
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(0)
    batch = put_rows(LENGTHS)

    def column(scale: float, shift: float) -> torch.Tensor:
        parts = [torch.randn(response, generator=generator) * scale + shift for _, response in LENGTHS]
        return torch.nested.as_nested_tensor(parts, layout=torch.jagged)

    fields = {
        "old_log_probs": column(0.1, -5.6),
        "ref_log_prob": column(0.1, -5.6),
        "advantages": column(1.0, 0.2),
    }
    return tq.kv_batch_put(
        keys=batch.keys, partition_id=PARTITION, fields=TensorDict(fields, batch_size=len(batch)), tags=batch.tags
    )


def call(batch: KVBatchMeta, keys: list[str], **extra_info) -> KVBatchMeta:
    """A worker call for some rows of the batch, with what verl's trainer says to every actor update."""
    tags = dict(zip(batch.keys, batch.tags, strict=True))
    common = {
        "temperature": 1.0,
        "calculate_entropy": True,
        "distillation_use_topk": False,
        "distillation_only": False,
        "seed": 1,
        "dataloader_kwargs": {"shuffle": False},
    }
    return KVBatchMeta(
        keys=keys,
        tags=[tags[key] for key in keys],
        partition_id=PARTITION,
        fields=batch.fields,
        extra_info=common | extra_info,
    )


@pytest.fixture(scope="module")
def actors(transfer_queue, tmp_path_factory) -> Iterator[tuple[RayWorkerGroup, RayWorkerGroup]]:
    """Two ranks that get pads, and one that does not."""
    model = make_tiny_model("qwen2", tmp_path_factory.mktemp("model"))
    overrides = (
        "actor_rollout_ref.actor.use_kl_loss=true",
        "actor_rollout_ref.actor.kl_loss_coef=0.1",
        "actor_rollout_ref.actor.entropy_coeff=0.01",
        "actor_rollout_ref.actor.loss_scale_factor=16",
        # AdamW divides a gradient by its own size: without this, elements whose gradient is all but zero move by
        # their rounding errors.
        "+actor_rollout_ref.actor.optim.override_optimizer_config.eps=1e-5",
    )
    budgets = [
        f"actor_rollout_ref.actor.ppo_max_token_len_per_gpu={BUDGET}",
        f"actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu={BUDGET}",
    ]
    padded_ranks = start_actor(model, 2, *overrides, *budgets)
    one_rank = start_actor(model, 1, *overrides)
    padded_ranks.execute_with_func_generator(wrap_worker_loss("rows"))
    yield padded_ranks, one_rank
    stop(padded_ranks)
    stop(one_rank)
    tq.kv_clear(keys=list(queue_content()), partition_id=PARTITION)


def plan_of(batch: KVBatchMeta, packer: str) -> BatchPlan:
    shape = {"dp_size": 2, "token_budget": BUDGET}
    job = Job(
        strategy="prompt",
        prompts=6,
        sessions_per_prompt=2,
        updates={"actor": Update(**shape, prompts_per_mini_batch=2)},
        inference={"log_prob": Pass(**shape)},
        packer=packer,
    )
    return plan_batch(Rows.from_keys(batch.keys, [prompt + response for prompt, response in LENGTHS]), job)


@pytest.mark.parametrize("packer", ["verl", "plan"])
@pytest.mark.parametrize("mode", ["token-mean", *SEQ_MEAN_MODES])
def test_two_padded_ranks_end_with_the_weights_of_one_rank_without_pads(mode, packer, actors):
    padded_ranks, one_rank = actors
    batch = put_trained_rows()
    for workers in actors:
        start_over(workers, mode)
    if packer == "plan":
        padded_ranks.execute_with_func_generator(install_in_worker)
    plan = plan_of(batch, packer)
    layout = plan.layouts["actor"]
    assert layout.n_mini_batches == 3
    assert layout.n_pads > 0

    before = weights_of(padded_ranks)
    assert torch.equal(before, weights_of(one_rank))

    padded = upsample(batch, plan, PadTemplate(eos_token_id=3, pad_length=2))
    group = PaddedWorkerGroup(padded_ranks, lambda: padded)
    # 7 is what a configuration would say, and wrong for every mini-batch here.
    got = group.update_actor(call(batch, batch.keys, global_batch_size=7, mini_batch_size=4, epochs=EPOCHS))
    strip(padded)

    want = []
    for _ in range(EPOCHS):
        for ranks in layout.cells:
            keys = [batch.keys[row] for cell in ranks for row in cell if row < len(batch.keys)]
            n_rows = len(keys)
            output = one_rank.update_actor(
                call(batch, keys, global_batch_size=n_rows, mini_batch_size=n_rows, epochs=1)
            )
            want.append(output["metrics"])

    after, reference = weights_of(padded_ranks), weights_of(one_rank)
    moved = (reference - before).norm()
    assert moved > 0.1, "the update was meant to move the weights"
    assert (after - reference).norm() <= RELATIVE_FLOAT32 * reference.norm()

    for name in (
        "actor/pg_loss",
        "kl_loss",
        "actor/entropy_loss",
        "grad_norm",
        "actor/ppo_kl",
        "actor/pg_clipfrac",
    ):
        np.testing.assert_allclose(
            got["metrics"][name], [step[name][0] for step in want], rtol=RELATIVE_METRIC, atol=5e-7, err_msg=name
        )
    micro_batches = got["metrics"][MICRO_BATCHES]
    assert len(micro_batches) == EPOCHS * layout.n_mini_batches
    if packer == "plan":
        planned = [len(rows_DK[0]) for rows_DK in layout.micro_batch_rows]
        assert micro_batches == planned * EPOCHS
        assert max(planned) > 1
        efficiency = np.dot(got["metrics"][PACKING_EFFICIENCY][: len(planned)], planned) / sum(planned)
        assert efficiency == pytest.approx(plan.figures["actor"].packing_efficiency)


@pytest.mark.parametrize("packer", ["verl", "plan"])
def test_log_probs_come_back_in_row_order_whoever_cuts_the_micro_batches(packer, actors):
    padded_ranks, one_rank = actors
    for workers in actors:
        start_over(workers, "token-mean")
    if packer == "plan":
        padded_ranks.execute_with_func_generator(install_in_worker)
    batch = put_trained_rows()
    asked = {"calculate_entropy": True, "compute_loss": False}

    def log_probs() -> list[torch.Tensor]:
        data = tq.kv_batch_get(keys=batch.keys, partition_id=PARTITION, select_fields=["log_probs"])
        # The last position of a row predicts the first token of whatever row is packed behind it.
        return [row[:-1].clone() for row in data["log_probs"].unbind()]

    one_rank.compute_log_prob(call(batch, batch.keys, **asked))
    want = log_probs()
    plan = plan_of(batch, packer)
    padded = upsample(batch, plan, PadTemplate(eos_token_id=3, pad_length=2))
    output = PaddedWorkerGroup(padded_ranks, lambda: padded).compute_log_prob(call(batch, batch.keys, **asked))
    got = log_probs()
    strip(padded)

    assert output.keys == batch.keys
    assert len({len(row) for row in want}) > 5
    for row_got, row_want in zip(got, want, strict=True):
        torch.testing.assert_close(row_got, row_want, rtol=1e-5, atol=1e-5)
