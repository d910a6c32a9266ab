"""On real FSDP2 ranks, the first optimizer step of a batch sees a ratio of exactly 1, and a KL of exactly 0."""

import pytest

from tests.equivalence.engine_shapes import Shape, started
from tests.equivalence.test_shared_prefixes import batch_and_plan
from tests.equivalence.updates import TEMPLATE, call, read_log_probs
from tests.support.fsdp2_workers import start_over
from tests.support.padded_rows import upsample
from tests.support.rows_in_queue import empty_queue, put_columns
from verl_padding.driver.worker_calls import PaddedWorkerGroup
from verl_padding.pads.upsampling import strip
from verl_padding.worker.plan_packer import install

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.usefixtures("transfer_queue")]

EXACT = ("actor/ppo_kl", "actor/pg_clipfrac", "actor/pg_clipfrac_lower", "kl_loss")


FSDP = "actor_rollout_ref.actor.fsdp_config"
WHOLE = (f"{FSDP}.fsdp_size=1", f"{FSDP}.use_no_sync_for_gradient_accumulation=true")


@pytest.mark.parametrize(
    ("dtype", "shape", "meet"),
    [("fp32", (), "micro_batch"), ("bf16", (), "micro_batch"), ("fp32", WHOLE, "mini_batch")],
    ids=["fp32", "bf16", "each rank has all parameters"],
)
def test_the_first_step_of_two_ranks_is_on_policy_to_the_last_bit(dtype, shape, meet, transfer_queue, model_of):
    precision = f"++{FSDP}.mixed_precision.param_dtype={dtype}"
    with started(Shape(), model_of(Shape()), precision, *shape) as ranks:
        # Engines that once share go on to share whatever the plan says is a chain: "off" has none.
        ranks.execute_with_func_generator(install("chains"))
        for sharing in ("off", "chains"):
            start_over(ranks, "token-mean")
            batch, plan = batch_and_plan(sharing=sharing, sync_point=meet)
            assert plan.figures["actor"].sharing_factor > 1.5 or sharing == "off"
            assert plan.layouts["actor"].n_mini_batches == 3
            assert plan.layouts["log_prob"].order == plan.layouts["actor"].order
            padded = upsample(batch, plan, TEMPLATE)
            group = PaddedWorkerGroup(ranks, lambda padded=padded: padded)
            group.compute_log_prob(call(batch, batch.keys, calculate_entropy=True, compute_loss=False))
            found = read_log_probs(batch)
            put_columns(batch, old_log_probs=found, ref_log_prob=[row.clone() for row in found])
            updated = group.update_actor(
                call(batch, batch.keys, global_batch_size=7, mini_batch_size=4, epochs=1, calculate_entropy=False)
            )
            strip(padded.pads)
            first = {name: updated["metrics"][name][0] for name in EXACT}
            assert first == dict.fromkeys(EXACT, 0.0), sharing
            # The weights have moved then.
            assert updated["metrics"]["actor/ppo_kl"][1] != 0.0
            empty_queue()
