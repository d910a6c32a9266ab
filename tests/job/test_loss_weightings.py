"""Which losses of a job weigh rows or sessions, and which cannot."""

from tests.support.verl_config import compose_padded
from verl_padding.driver.job_check import check_job
from verl_padding.job.loss_weightings import loss_weighting

A, R, REF_ = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "actor_rollout_ref.ref"


MODEL, GAE, KL = "actor_rollout_ref.model", "algorithm.adv_estimator=gae", f"{A}.use_kl_loss=true"


def test_sessions_weigh_the_same_where_the_job_says_so():
    for setting, by_session in (("row", False), ("session", True)):
        config = compose_padded(f"padding.weighting={setting}", "padding.denominator=nominal")
        weighting = loss_weighting(config, check_job(config).padding)
        assert (weighting.mode, weighting.refusal) == ("token-mean", "")
        assert (weighting.by_session, weighting.by_rows) == (by_session, False)
