"""Which losses of a job weigh rows or sessions, and which cannot."""

from tests.support.verl_config import DYNAMIC, compose_job
from verl_padding.driver.job_check import check_job
from verl_padding.job.calls import ACTOR, CRITIC
from verl_padding.job.loss_weightings import loss_weightings

A, R, REF_ = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "actor_rollout_ref.ref"


MODEL, GAE, KL = "actor_rollout_ref.model", "algorithm.adv_estimator=gae", f"{A}.use_kl_loss=true"


def padded(*overrides):
    return compose_job("+padding=prompt", *DYNAMIC, *overrides)


def test_sessions_weigh_the_same_where_the_job_says_so():
    critic = (GAE, "critic.loss_agg_mode=seq-mean-token-mean")
    for where, calls in (("actor", [ACTOR]), ("all", [ACTOR, CRITIC])):
        overrides = ("padding.weighting=session", f"padding.weighted_losses={where}", "padding.denominator=nominal")
        config = padded(*critic, *overrides)
        found = loss_weightings(config, check_job(config).padding)
        assert [weighting.call for weighting in found] == calls
        assert [weighting.mode for weighting in found] == ["token-mean", "seq-mean-token-mean"][: len(calls)]
        assert all(weighting.by_session and not weighting.by_rows and not weighting.refusal for weighting in found)
    without_critic = padded("padding.weighted_losses=all")
    found = loss_weightings(without_critic, check_job(without_critic).padding)
    assert [weighting.call for weighting in found] == [ACTOR]
