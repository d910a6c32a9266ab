"""An engine that pads rows to the longest of their micro-batch trains as one that packs them."""

import pytest
from ray.exceptions import RayTaskError

from tests.equivalence.updates import BUDGET, put_trained_rows, update_both
from tests.support.fsdp2_workers import padded_and_plain, start_actor
from tests.support.tolerance import ADAM_EPS
from tests.support.verl_config import compose_job
from verl_padding.config import PaddingConfig
from verl_padding.driver.engine_check import check_engines
from verl_padding.job.job_reader import JobReader
from verl_padding.plan import Job, Rows, Update, plan_batch
from verl_padding.worker import plan_packer

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.usefixtures("transfer_queue")]


@pytest.fixture(scope="module")
def ranks(transfer_queue, qwen2):
    padded = (
        "actor_rollout_ref.model.use_remove_padding=false",
        f"actor_rollout_ref.actor.ppo_max_token_len_per_gpu={BUDGET}",
    )
    config = compose_job("+local=cpu", "algorithm.adv_estimator=grpo", f"actor_rollout_ref.model.path={qwen2}", *padded)
    engine = JobReader(config, PaddingConfig(packer="plan"), "sync").engines["actor"]
    assert engine.padded_to == "micro_batch"
    with padded_and_plain(start_actor, qwen2, f"+actor_rollout_ref.actor.optim.{ADAM_EPS}", padded=padded) as (
        padded_ranks,
        one_rank,
    ):
        padded_ranks.execute_with_func_generator(check_engines({"actor": engine.config}))
        with pytest.raises(RayTaskError, match=r"engine of actor was made with .*use_remove_padding=True"):
            one_rank.execute_with_func_generator(check_engines({"actor": engine.config}))
        padded_ranks.execute_with_func_generator(plan_packer.install())
        yield padded_ranks, one_rank


def test_padded_rows_give_the_weights_of_packed_ones_and_hold_the_budget(ranks):
    batch = put_trained_rows()
    tokens = [tag["seq_len"] for tag in batch.tags]
    update = Update(dp_size=2, token_budget=BUDGET, prompts_per_mini_batch=2, padded_to="micro_batch")
    job = Job(
        strategy="prompt", prompts=6, sessions_per_prompt=2, updates={"actor": update}, inference={}, packer="plan"
    )
    plan = plan_batch(Rows.from_keys(batch.keys, tokens), job)
    both = update_both(*ranks, batch, plan)
    all_tokens = [*tokens, *[2] * both.layout.n_pads]
    areas = [
        len(block) * max(all_tokens[row] for row in block)
        for mini_batch in range(both.layout.n_mini_batches)
        for rank in range(2)
        for block in both.layout.micro_batches(mini_batch, rank)
    ]
    assert max(areas) <= BUDGET
    assert sum(areas) > sum(all_tokens)  # something was padded
