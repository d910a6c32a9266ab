"""A job's config is composed as Hydra composes it when the job runs, with the values that Hydra itself knows then."""

import os
import subprocess
import sys
from pathlib import Path

PRINT = """
import sys
from verl_padding.verl_job.composition import JobArguments, compose_job
for project in sys.argv[1:]:
    config = compose_job(JobArguments(overrides=(
        "hydra.run.dir=outputs/${hydra:job.name}/${trainer.project_name}",
        f"trainer.project_name={project}",
        "trainer.default_local_dir=${hydra:runtime.output_dir}",
        "trainer.rollout_data_dir=${hydra:run.dir}",
        "trainer.validation_data_dir=${hydra:runtime.cwd}",
    )))
    assert "hydra" not in config
    print(config.trainer.default_local_dir, config.trainer.rollout_data_dir, config.trainer.validation_data_dir)
"""


def test_hydras_own_values_are_those_of_each_job_also_of_the_first_one_in_a_process(tmp_path: Path):
    run = subprocess.run(
        [sys.executable, "-c", PRINT, "one", "two"],
        cwd=tmp_path,
        env=os.environ | {"VERL_PLATFORM": "cpu"},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr
    lines = [line.split(" ") for line in run.stdout.splitlines() if str(tmp_path) in line]
    assert len(lines) == 2
    for project, (output, folder, cwd) in zip(("one", "two"), lines, strict=True):
        assert folder == f"outputs/main_ppo/{project}"
        assert (output, cwd) == (f"{tmp_path}/{folder}", str(tmp_path))
