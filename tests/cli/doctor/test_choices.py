"""Names that verl does not know, or that only a module of the job may."""

from tests.support.doctored_job import LOOP, LOOPS, A, mistakes


@mistakes(
    ({LOOP: "single_turn_agnt"}, "single_turn_agent"),
    ({LOOPS: "agent.yaml", LOOP: "mien"}, "mine"),
    ({"actor_rollout_ref.model.external_lib": "no_code"}, "no_code"),
    ({"algorithm.adv_estimator": "grpoo"}, "grpo"),
    ({f"{A}.policy_loss.loss_mode": "vanila"}, "vanilla"),
    ({"actor_rollout_ref.rollout.name": "vlm"}, "vllm"),
    ({f"{A}.kl_loss_type": "low_var"}, "low_var_kl?"),
    ({"trainer.resume_mode": "resum"}, "resume_path"),
    ({"algorithm.adv_estimator": "gae", "critic.model.external_lib": "no_code"}, "no_code"),
)
def test_a_mistake_is_named_with_its_setting_and_a_fix(changes, subject, words, assert_named):
    assert_named(changes, subject, words)
