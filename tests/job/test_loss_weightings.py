"""Which losses of a job weigh rows or sessions, and which cannot."""

from tests.support.verl_config import compose_padded
from verl_padding.driver.job_check import check_job
from verl_padding.job.loss_weightings import loss_weighting


def test_sessions_weigh_the_same_where_the_job_says_so():
    for setting, by_session in (("row", False), ("session", True)):
        config = compose_padded(f"padding.weighting={setting}", "padding.denominator=nominal")
        weighting = loss_weighting(config, check_job(config).padding)
        assert (weighting.mode, weighting.refusal) == ("token-mean", "")
        assert (weighting.by_session, weighting.divides_by_rows) == (by_session, False)
