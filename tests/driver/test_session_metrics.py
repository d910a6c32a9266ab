"""Means over sessions, whatever their rows."""

from verl_padding.driver.session_metrics import session_metrics

OF_SESSIONS = {
    "padding/session/score/mean": 0.5,
    "padding/session/response_length/mean": 6.0,
    "padding/session/rows/mean": 4 / 3,
    "padding/session/rows/max": 2,
    "padding/session/num_turns/mean": 3.0,
}
KEYS = ["a_0_10", "a_0_2", "a_1_0", "b_0_0"]


def test_a_session_counts_once_with_the_score_of_its_last_row():
    metrics = session_metrics(KEYS, response_R=[5, 3, 4, 6], score_R=[1.0, 7.0, 0.0, 0.5], turns_R=[2, 4, 2, 1])
    assert metrics == OF_SESSIONS


def test_agent_loops_that_count_no_turns_have_no_metric_of_them():
    assert "padding/session/num_turns/mean" not in session_metrics(KEYS, [1] * 4, [0.0] * 4)
