"""The curves of padded runs and of stock verl's, from the files that they leave."""

from tests.cli.test_plan import write_lines
from tests.support.run_folder import write_run
from verl_padding.cli.curves import SESSION_REWARD, read_curves
from verl_padding.record.run_files import METRICS, ROLLOUTS, ROW_REWARD


def test_a_logged_reward_of_a_session_needs_no_dump(tmp_path):
    folder = write_run(tmp_path, padded=True)
    (folder / ROLLOUTS / "2.jsonl").write_text("nobody reads it")
    logged = {ROW_REWARD: 0.5, "padding/session/score/mean": 0.125}
    data = {1: {ROW_REWARD: 0.5}, 2: logged}
    write_lines(folder / METRICS, [{"step": step, "data": each} for step, each in data.items()])
    curves, notes = read_curves(folder)
    assert (curves[SESSION_REWARD], notes) == ({1: 0.25, 2: 0.125}, [])
