"""Names that verl does not know, or that only a module of the job may."""

from tests.support.doctored_job import LOOP, LOOPS, TURNS, A, mistakes


@mistakes(
    ({LOOP: "single_turn_agnt"}, "single_turn_agent"),
    ({LOOPS: "agent.yaml", LOOP: "mien"}, "mine"),
    ({"actor_rollout_ref.model.external_lib": "no_code"}, "no_code"),
    ({"algorithm.adv_estimator": "grpoo"}, "grpo"),
    ({f"{A}.policy_loss.loss_mode": "vanila"}, "vanilla"),
    ({f"{A}.kl_loss_type": "low_var"}, "low_var_kl?"),
    ({"actor_rollout_ref.rollout.name": "vlm"}, "vllm"),
    ({f"{TURNS}.format": "hermess"}, "hermes"),
    ({"trainer.resume_mode": "resum"}, "resume_path"),
)
def test_a_mistake_is_named_with_its_setting_and_a_fix(changes, subject, words, assert_named):
    assert_named(changes, subject, words)


def test_a_parser_that_modules_of_the_job_may_register_is_warned_of(found, monkeypatch):
    parser = {f"{TURNS}.format": "mine"}
    assert found(parser)[f"{TURNS}.format"][0] == "wrong"
    of_a_loop = found(parser | {LOOPS: "agent.yaml", LOOP: "mine"})
    monkeypatch.setenv("VERL_USE_EXTERNAL_MODULES", "code_of_mine")
    for warned in (of_a_loop, found(parser)):
        assert warned[f"{TURNS}.format"][0] == "warning"
