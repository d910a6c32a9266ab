"""The entry point: found by verl, light, and silent while it is not asked for."""

import json
import os
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path

import pytest

from verl_padding.entry.loud_failure import asks_for_padding
from verl_padding.verl_job.modes import MODE_PREFIX, STOCK_MODES

# Tests run beside a torchvision that does not fit a torch without CUDA: whoever imports transformers needs this first.
WITH_TORCHVISION = "import verl_padding.local\n"


def run_python(code: str, **environment: str) -> str:
    """Standard output of ``code`` in a fresh interpreter, without a platform chosen."""
    env = {name: value for name, value in os.environ.items() if name != "VERL_PLATFORM"} | environment
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, check=False)
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_verl_finds_one_entry_point_and_it_loads():
    (entry,) = [entry for entry in entry_points(group="verl.plugins") if entry.name == "verl_padding"]
    assert entry.value == "verl_padding.plugin"
    assert entry.load().__name__ == "verl_padding.plugin"


def test_importing_verl_imports_the_plugin_and_nothing_heavy_of_it():
    code = (
        "import json, sys, verl\n"
        "print(json.dumps(sorted(m for m in sys.modules if m.split('.')[0] in ('verl_padding', 'wrapt'))))"
    )
    modules = json.loads(run_python(code).splitlines()[-1])
    assert "verl_padding.plugin" in modules
    ours = [name for name in modules if name.startswith("verl_padding")]
    assert ours == [
        "verl_padding",
        "verl_padding.entry",
        "verl_padding.entry.import_hooks",
        "verl_padding.entry.loud_failure",
        "verl_padding.errors",
        "verl_padding.patches",
        "verl_padding.patches.check_of_rows",
        "verl_padding.plugin",
        "verl_padding.verl_job",
        "verl_padding.verl_job.known_verl",
        "verl_padding.verl_job.modes",
        "verl_padding.version",
    ]


def test_the_plugin_costs_a_few_milliseconds():
    # Not a benchmark: an import of torch, Ray or verl's trainer would cost a hundred times as much.
    code = (
        "import os; os.environ['VERL_USE_EXTERNAL_PLUGINS'] = 'none'\n"
        "import time, verl\n"
        "started = time.process_time()\n"
        "import verl_padding.plugin\n"
        "print(time.process_time() - started)"
    )
    assert any(float(run_python(code).splitlines()[-1]) < 0.1 for _ in range(3))


def test_the_trainers_are_registered_when_verl_imports_its_own():
    code = (
        f"{WITH_TORCHVISION}import verl\n"
        "from verl.trainer.ppo.v1 import get_trainer_cls\n"
        "for mode in ('sync', 'colocate_async', 'separate_async'):\n"
        "    assert issubclass(get_trainer_cls('padded_' + mode), get_trainer_cls(mode))\n"
        "    assert get_trainer_cls(mode).__module__.startswith('verl.'), mode\n"
        "print('ok')"
    )
    assert run_python(code).splitlines()[-1] == "ok"


def test_a_broken_plugin_is_told_of_and_leaves_verl_working():
    code = (
        f"{WITH_TORCHVISION}import sys, logging\n"
        "sys.modules['verl_padding.trainer.mixin'] = sys.modules['verl_padding.entry.hydra_search_path'] = None\n"
        "import verl\n"
        "from verl.trainer.ppo.v1 import get_trainer_cls\n"
        "print(get_trainer_cls('sync').__name__)\n"
        "try:\n"
        "    get_trainer_cls('padded_sync')\n"
        "except ValueError as refusal:\n"
        "    print(refusal)\n"
    )
    env = {name: value for name, value in os.environ.items() if name != "VERL_PLATFORM"}
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, check=True)
    assert "PPOTrainerSync" in result.stdout
    assert "Unknown trainer 'padded_sync'" in result.stdout
    assert "the padded trainers could not be registered" in result.stderr
    assert "the config groups could not be put on Hydra's search path" in result.stderr
    assert "Traceback" in result.stderr


@pytest.mark.parametrize("flag", ["padding.strategy=nonsense", "data.train_batch_size=1000"])
def test_a_job_that_cannot_run_ends_before_ray_starts(flag, tmp_path):
    command = [sys.executable, "-m", "verl.trainer.main_ppo", "+padding=prompt", flag, f"hydra.run.dir={tmp_path}"]
    result = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert result.returncode == 1
    assert result.stderr.splitlines()[-1].startswith("verl_padding: ")
    assert "ray init kwargs" not in result.stdout


@pytest.mark.parametrize(
    ("arguments", "found"),
    [
        (["data.n=1", "+padding=prompt"], "+padding=prompt"),
        (["++padding.seed=1"], "++padding.seed=1"),
        (["trainer.v1.trainer_mode=padded_sync"], "trainer.v1.trainer_mode=padded_sync"),
        (["trainer.v1.trainer_mode=sync", "data.padding=1", "padding_side=left"], None),
    ],
)
def test_a_command_line_asks_for_padding_by_its_section_or_by_a_padded_trainer(arguments, found):
    assert asks_for_padding(arguments) == found


@pytest.mark.parametrize("mode", STOCK_MODES)
def test_it_knows_the_padded_name_of_every_mode(mode):
    argument = f"trainer.v1.trainer_mode={MODE_PREFIX}{mode}"
    assert asks_for_padding([argument]) == argument


@pytest.mark.parametrize(
    ("broken", "told"),
    [
        ("wrapt", "the plug-in could not be loaded"),
        ("verl_padding.entry.hydra_search_path", "the config groups could not be put on Hydra's search path"),
    ],
)
def test_a_job_that_asks_for_padding_ends_where_the_plugin_is_broken(broken, told, tmp_path):
    result = compose_on_the_command_line(f"import sys; sys.modules[{broken!r}] = None", "+padding=prompt", tmp_path)
    assert result.returncode == 1
    assert result.stderr.splitlines()[-1] == (
        f"verl_padding: +padding=prompt: {told} (the reason is above). Run `verl-padding doctor`, or remove "
        "+padding=prompt."
    )
    assert "ModuleNotFoundError" in result.stderr
    assert "algorithm:" not in result.stdout, "the job's config was made"


def test_a_job_that_does_not_ask_goes_on_where_the_plugin_is_broken(tmp_path):
    result = compose_on_the_command_line("import sys; sys.modules['wrapt'] = None", "data.train_batch_size=8", tmp_path)
    assert result.returncode == 0, result.stderr
    assert "algorithm:" in result.stdout


def test_without_the_plugin_hydra_takes_the_flag_for_a_plain_string(tmp_path):
    # Why run scripts start with the doctor: nothing of ours is there to speak. If this fails, Hydra speaks.
    leave_out = "import os; os.environ['VERL_USE_EXTERNAL_PLUGINS'] = 'none'"
    result = compose_on_the_command_line(leave_out, "+padding=prompt", tmp_path)
    assert result.returncode == 0, result.stderr
    assert "\npadding: prompt\n" in result.stdout


def compose_on_the_command_line(before: str, override: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """verl's own command, which only shows its config; with some Python before it."""
    code = (
        f"{WITH_TORCHVISION}{before}\nimport runpy, sys\nsys.argv[1:] = [{override!r}, '--cfg', 'job']\n"
        "runpy.run_module('verl.trainer.main_ppo', run_name='__main__')"
    )
    env = {name: value for name, value in os.environ.items() if name != "VERL_PLATFORM"}
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=env, cwd=folder, check=False
    )
