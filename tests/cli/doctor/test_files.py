"""Files, modules and names in them that are not there."""

import pytest

from tests.support.doctored_job import (
    ENGINE,
    LOOPS,
    MODEL,
    REWARD,
    SAMPLER,
    TURNS,
    A,
    mistakes,
)


@mistakes(
    ({LOOPS: "none.yaml"}, "none.yaml"),
    ({LOOPS: "no_class.yaml"}, "Mine"),
    ({LOOPS: "no_module.yaml"}, "no_code"),
    ({f"{REWARD}.path": "none.py"}, "none.py"),
    ({f"{REWARD}.path": "broken.py"}, "line 1"),
    ({f"{REWARD}.path": "code_of_mine.py", f"{REWARD}.name": "compute_scor"}, "compute_score"),
    ({f"{SAMPLER}.path": "pkg://no_code"}, "no_code"),
    ({f"{TURNS}.function_tool_path": "none.py"}, "none.py"),
    ({"trainer.checkpoint_callback_class": "no_code.Mine"}, "no_code"),
    ({"trainer.resume_mode": "resume_path", "trainer.resume_from_path": "/none"}, "/none"),
    ({f"{ENGINE}.custom_backend_module": "no_code"}, "no_code"),
    ({f"{TURNS}.tool_config_path": "tools.yaml"}, "no_code"),
    ({MODEL: "/none/model"}, "/none/model"),
    ({MODEL: "no_such_owner/no_such_model"}, "no_such_model"),
    ({"actor_rollout_ref.rollout.name": "???"}, "not set"),
    ({f"{A}.optim.optimizer": "AdamX"}, "Adam"),
    ({"trainer.resume_from_path": "global_step_3"}, "resume_path"),
)
def test_a_mistake_is_named_with_its_setting_and_a_fix(changes, subject, words, assert_named):
    assert_named(changes, subject, words)


@pytest.mark.parametrize("loops", ["no_names.yaml", "no_list.yaml", "broken.yaml"])
def test_a_file_of_agent_loops_that_verl_cannot_read_is_refused(loops, found):
    with pytest.raises(ValueError, match=loops):
        found({LOOPS: loops})
