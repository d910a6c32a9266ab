"""Jobs on a verl whose source has changed: refused with the names of what is missing, or without
the saving that needs it."""

import os
import subprocess
import sys

import pytest

from tests.support.changed_verl import (
    DENOMINATORS,
    SIX,
    copy_of_verl,
    rename,
    without_denominators,
    without_six_methods,
)
from tests.support.verl_config import compose_padded
from verl_padding.cli.doctor import installation
from verl_padding.driver.job_check import check_job
from verl_padding.errors import PaddingConfigError
from verl_padding.job import verl_check
from verl_padding.job.verl_check import untried_verl
from verl_padding.job.verl_facts import BASE, ENGINES, FILTER, REPLAY


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """A copy of verl that checks take for the installed one, changed by words in files."""
    made = []

    def change(name_of, *files):
        made.append(copy_of_verl(tmp_path / str(len(made))))
        if name_of:
            assert rename(made[-1], name_of, *files) > 0
        monkeypatch.setattr(verl_check, "installed_verl", lambda: made[-1])
        return made[-1]

    return change


@pytest.mark.parametrize(
    ("change", "names"),
    [
        (without_six_methods, SIX),
        (without_denominators, (*DENOMINATORS, "self.engine.train_batch(")),
    ],
)
def test_a_verl_that_has_changed_is_refused_with_all_that_is_missing(
    change, names, tmp_path, monkeypatch
):
    verl = change(tmp_path)
    monkeypatch.setattr(verl_check, "installed_verl", lambda: verl)
    with pytest.raises(PaddingConfigError) as refusal:
        check_job(compose_padded())
    message = str(refusal.value)
    assert message.startswith(f"verl=={verl.version}: ")
    assert "\n" not in message
    assert [name for name in names if name not in message] == []
    assert "install verl==" in message.lower()


@pytest.mark.slow
def test_main_ppo_ends_before_ray_on_a_verl_that_has_changed(tmp_path):
    without_six_methods(tmp_path, can_run=True)
    command = [sys.executable, "-m", "verl.trainer.main_ppo", "+padding=prompt"]
    command += [f"hydra.run.dir={tmp_path}", "ray_kwargs.ray_init.num_cpus=1"]
    environment = os.environ | {"PYTHONPATH": str(tmp_path), "RAY_TMPDIR": str(tmp_path / "ray")}
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert ran.returncode == 1
    said = ran.stderr.strip().splitlines()[-1]
    assert said.startswith("verl_padding: verl==")
    assert [name for name in SIX if name not in said] == []
    assert not (tmp_path / "ray").exists(), "Ray has started"


@pytest.mark.parametrize(
    ("name", "file", "overrides"),
    [
        ("_dapo_filtered_keys", REPLAY, [f"{FILTER}=true"]),
        ("batch_num_tokens", f"{ENGINES}/megatron/transformer_impl.py", ["model_engine=megatron"]),
    ],
)
def test_what_is_missed_of_a_setting_refuses_the_jobs_that_set_it(name, file, overrides, installed):
    installed({name: f"{name}_new"}, file)
    check_job(compose_padded())
    with pytest.raises(PaddingConfigError, match=name):
        check_job(compose_padded(*overrides))


@pytest.mark.parametrize(
    ("name", "saving", "value"),
    [("prepare_model_outputs", "sharing", "on"), ("prepare_micro_batches", "packer", "plan")],
)
def test_what_is_missed_of_a_saving_turns_it_off(name, saving, value, installed):
    fsdp = f"{ENGINES}/fsdp/transformer_impl.py"
    auto = ("padding.packer=auto", "padding.sharing=auto")
    assert check_job(compose_padded(*auto)).savings.is_on(saving)
    installed({name: f"{name}_new"}, fsdp)
    job = check_job(compose_padded(*auto))
    assert not job.savings.is_on(saving)
    assert name in "".join(map(str, job.savings.incompatibilities[saving]))
    with pytest.raises(PaddingConfigError, match=rf"padding\.{saving}='{value}': .*{name}"):
        check_job(compose_padded(*auto, f"padding.{saving}={value}"))
    job = check_job(compose_padded("model_engine=megatron", *auto))
    assert name not in "".join(map(str, job.savings.incompatibilities[saving])), "of another engine"


def test_a_release_that_was_not_tried_is_said_and_not_refused(installed):
    verl = installed({})
    (verl.root / "version/version").write_text("0.10.0\n")
    check_job(compose_padded())
    assert "0.10.0" in untried_verl()


def test_the_doctor_shows_what_is_missing(installed, monkeypatch):
    verl = installed({"_compute_advantage": "_estimate"}, BASE)
    monkeypatch.setattr("verl_padding.job.verl_source.installed_verl", lambda: verl)
    rename(verl, {"_dapo_filtered_keys": "_filtered"}, REPLAY)
    (verl.root / "version/version").write_text("0.10.0\n")
    found = list(installation.verl())
    (wrong,) = [each.message for each in found if each.verdict == "wrong"]
    assert "self._compute_advantage(" in wrong
    warnings = "".join(each.message for each in found if each.verdict == "warning")
    assert FILTER in warnings
    assert "0.10.0" in warnings
