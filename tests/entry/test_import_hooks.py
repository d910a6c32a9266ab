"""The entry point: found by verl, light, and silent while it is not asked for."""

import json

import pytest

from tests.support.fresh_processes import run_fresh
from tests.support.verl_config import DYNAMIC

# Tests run beside a torchvision that does not fit a torch without CUDA: whoever imports
# transformers needs this first.
WITH_TORCHVISION = "import verl_padding.on_cpu\n"
IMPORT_VERL = """
import json, sys
import verl
print(json.dumps(sorted(name for name in sys.modules if name.split(".")[0] == "verl_padding")))
"""
"""Says which modules of ours verl imports."""
IMPORT_BROKEN = f"""
{WITH_TORCHVISION}
import sys, logging
for name in ("driver.mixin", "entry.hydra_search_path"):
    sys.modules["verl_padding." + name] = None
import verl
from verl.trainer.ppo.v1 import get_trainer_cls
print(get_trainer_cls("sync").__name__)
"""
RUN_VERL = f"""
{WITH_TORCHVISION}
import runpy
runpy.run_module("verl.trainer.main_ppo", run_name="__main__")
"""
"""verl's own command; with ``--cfg job``, it only shows its config."""
RUN_BROKEN = f"{WITH_TORCHVISION}import sys; sys.modules['wrapt'] = None\n{RUN_VERL}"
OWN_CONFIG = ["--config-dir", ".", "--config-name", "mine"]
CASES = {
    "verl": (IMPORT_VERL, []),
    "broken": (IMPORT_BROKEN, []),
    "broken, asked for": (RUN_BROKEN, ["+padding=prompt", "--cfg", "job"]),
    "a config of one's own": (
        RUN_VERL,
        [*OWN_CONFIG, "hydra.run.dir=.", "+padding=prompt", *DYNAMIC, "data.train_batch_size=1022"],
    ),
}
"""What runs, with its arguments, in a process of its own without a platform chosen."""


@pytest.fixture(scope="module")
def ended(tmp_path_factory):
    """Case -> its process."""
    folder = tmp_path_factory.mktemp("processes")
    mode = "trainer:\n  v1:\n    trainer_mode: separate_async\n"
    (folder / "mine.yaml").write_text(f"defaults:\n  - ppo_trainer\n  - _self_\n{mode}")
    return {
        name: run_fresh(code, *arguments, platform=None, folder=folder)
        for name, (code, arguments) in CASES.items()
    }


def test_importing_verl_imports_the_plugin_and_nothing_heavy_of_it(ended):
    modules = json.loads(ended["verl"].stdout.splitlines()[-1])
    light = ["driver", "driver.validate_config", "entry", "entry.import_hooks"]
    light += ["entry.plugin_errors", "job", "job.vendor", "plugin", "version"]
    assert modules == ["verl_padding", *(f"verl_padding.{name}" for name in light)]


def test_a_broken_plugin_is_reported_of_and_leaves_verl_working(ended):
    result = ended["broken"]
    assert "PPOTrainerSync" in result.stdout
    assert "the padded trainers could not be imported" in result.stderr
    assert "the config groups could not be put on Hydra's search path" in result.stderr
    assert "Traceback" in result.stderr


def test_verls_own_command_checks_a_job_by_the_mode_of_its_primary_config(ended):
    result = ended["a config of one's own"]
    assert result.returncode == 1
    assert "trainer.v1.separate_async.parameter_sync_step" in result.stderr.splitlines()[-1]
    assert "ray init kwargs" not in result.stdout


def test_a_job_that_asks_for_padding_ends_where_the_plugin_is_broken(ended):
    result = ended["broken, asked for"]
    assert result.returncode == 1
    assert result.stderr.splitlines()[-1].startswith("verl_padding: +padding=prompt: ")
    assert "ModuleNotFoundError" in result.stderr
    assert "algorithm:" not in result.stdout, "the job's config was made"
