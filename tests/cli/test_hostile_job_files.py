"""Config files of somebody else's job: no command runs code of theirs, unless the command line says
so."""

import json
from contextlib import suppress
from operator import attrgetter

import datasets
import pyarrow.parquet as pq
import pytest
import verl.utils.config
from omegaconf import OmegaConf
from verl.experimental.reward_loop import reward_loop

from tests.support.hostile_run import (
    AUTO_MAP,
    TAKEN,
    beside_a_job,
    fetched_by_a_shell,
    result_of,
    target,
)
from verl_padding.errors import PaddingConfigError
from verl_padding.on_cpu.in_the_job import trust_models_as_the_job
from verl_padding.on_cpu.reduced_job import reduced, write_shrunk_model
from verl_padding.record.run_files import CONFIG

TRUST = "actor_rollout_ref.model.trust_remote_code"


def result_with(run, command, values):
    """The result of a command on the run's config file with these values."""
    config = OmegaConf.load(run / CONFIG)
    for name, value in values.items():
        OmegaConf.update(config, name, value, force_add=True)
    OmegaConf.save(config, run / CONFIG)
    folder = (run / CONFIG).parent
    return result_of(run, command, "--config-path", folder, "--config-name", "config")


@pytest.mark.parametrize("command", ["doctor", "dry-run"])
def test_a_jobs_config_file_trusts_no_model_and_brings_no_code(command, hostile, monkeypatch):
    # The job itself runs its data, agents and rewards, and is not started here.
    def not_started(*_):
        raise AssertionError("nothing was refused")

    monkeypatch.setattr("verl_padding.on_cpu.dry_run._run_job", not_started)
    beside_a_job(hostile, monkeypatch)
    (hostile / "hostile_lib.py").write_text(f"open({str(hostile.parent / TAKEN)!r}, 'w')")
    (hostile / "model" / "config.json").write_text(
        json.dumps({"model_type": "hostile", "auto_map": AUTO_MAP, "architectures": ["Trainer"]})
    )
    for values, named in (
        ({}, "trust_remote_code=True"),
        ({TRUST: False, "actor_rollout_ref.model.external_lib": "hostile_lib"}, "hostile_lib"),
        ({"actor_rollout_ref.actor.optim": target(hostile)}, "logging.FileHandler"),
        ({"model_engine": f"../{hostile.name}/evil"}, "model_engine"),
    ):
        result = result_with(hostile, command, values)
        assert result.exit_code == 1
        assert named in "".join(result.output.split())


@pytest.mark.parametrize("command", ["doctor", "dry-run"])
def test_a_jobs_config_file_puts_no_package_on_hydras_search_path(command, hostile, monkeypatch):
    beside_a_job(hostile, monkeypatch)
    (hostile / "beside.py").write_text(f"open({str(hostile.parent / TAKEN)!r}, 'w').close()")
    mine = {"defaults": ["ppo_trainer"], "hydra": {"searchpath": ["pkg://beside"]}}
    OmegaConf.save(OmegaConf.create(mine), hostile / "mine.yaml")
    result = result_of(hostile, command, "--config-dir", hostile, "--config-name", "mine")
    assert result.exit_code == 1
    assert "pkg://beside" in "".join(result.output.split())


def test_files_on_a_search_path_of_the_command_line_are_data(hostile, job, monkeypatch):
    beside_a_job(hostile, monkeypatch)
    model = {"path": str(hostile / "model"), "trust_remote_code": True}
    acts = {"actor": {"optim": {"override_optimizer_config": {"x": target(hostile)}}}}
    (hostile / "recipe").mkdir()
    for name, role in {"trusts": {"model": model}, "acts": acts}.items():
        text = OmegaConf.to_yaml({"actor_rollout_ref": role})
        (hostile / "recipe" / f"{name}.yaml").write_text(f"# @package _global_\n{text}")
    others = [each for each in job if "model.path" not in each]
    for name in ("trusts", "acts"):
        typed = (f"hydra.searchpath=[file://{hostile}]", f"+recipe={name}", "+padding=rows")
        result = result_of(hostile, "doctor", *others, *typed)
        assert ("logging.FileHandler" in "".join(result.output.split())) == (name == "acts")
        assert ("trust_remote_code=True" in result.stderr) == (name == "trusts")


@pytest.mark.parametrize(
    "place",
    [
        "actor_rollout_ref.model.tokenizer_path",
        *(f"critic.model.{name}" for name in ("path", "hf_config_path", "tokenizer_path")),
    ],
)
def test_the_doctor_opens_no_model_that_is_no_folder(place, hostile, monkeypatch):
    beside_a_job(hostile, monkeypatch)
    checked, check = [], verl.utils.config.validate_config

    def noted(*args):
        checked.append(args)
        check(*args)

    monkeypatch.setattr("verl.utils.config.validate_config", noted)
    values = {"algorithm.adv_estimator": "gae", place: fetched_by_a_shell(hostile)}
    result_with(hostile, "doctor", values)
    assert checked


def test_a_dry_run_opens_no_model_calls_no_hook_and_reads_no_pickle(hostile, tmp_path):
    config = OmegaConf.load(hostile / CONFIG)
    for section in (config.actor_rollout_ref.model, config.critic.model):
        for place in ("path", "hf_config_path", "tokenizer_path", "lora_adapter_path"):
            section[place] = fetched_by_a_shell(hostile)
    acts = {"finish_hook_cmd": f"touch {hostile.parent / TAKEN}", "tool": "nsys", "steps": [1]}
    config.global_profiler.update(acts)
    pickles, roles = ("rollout", "rollout_tq", "async_rollout"), ("actor", "ref", "rollout")
    for name in pickles:
        config.skip[name].update(enable=True, dump_dir=str(hostile))
    for role in roles:
        config.actor_rollout_ref[role].profiler.enable = True
    small, _ = reduced(config, folder=tmp_path, attention="sdpa")
    assert "hdfs://" not in OmegaConf.to_yaml(small, resolve=True)
    assert small.skip.keys() == {"_target_", *pickles}
    assert not any(small.skip[name].enable for name in pickles)
    assert {small.global_profiler[name] for name in acts} == {None}
    assert not any(small.actor_rollout_ref[role].profiler.enable for role in roles)
    config.data.val_files = [fetched_by_a_shell(hostile)]
    with pytest.raises(PaddingConfigError, match=r"^data\.val_files="):
        reduced(config, folder=tmp_path, attention="sdpa")


def test_the_doctor_does_not_fetch_the_images_of_rows(hostile, job, monkeypatch):
    (hostile / "images").mkdir()
    rows = datasets.Dataset.from_list(
        [{"prompt": [{"role": "user", "content": "?"}], "image": "http://127.0.0.1:9/row.png"}] * 32
    )
    rows = rows.cast_column("image", datasets.Image())
    table = rows.data.table.replace_schema_metadata(rows.features.arrow_schema.metadata)
    pq.write_table(table, hostile / "rows.parquet")
    asked = []
    monkeypatch.setattr("socket.socket.connect", lambda _, address: asked.append(address))
    files = [f"data.{name}_files={hostile / 'rows.parquet'}" for name in ("train", "val")]
    others = [each for each in job if "_files=" not in each]
    result = result_of(hostile, "doctor", *others, *files, "+padding=rows")
    assert "cannot be read" not in result.output
    assert ("127.0.0.1", 9) not in asked


def test_what_a_file_means_once_it_is_checked_is_what_was_checked(hostile, monkeypatch):
    beside_a_job(hostile, monkeypatch)
    config = OmegaConf.load(hostile / CONFIG)
    del config.padding
    OmegaConf.save(config, hostile / CONFIG)
    named = target(hostile)["_target_"]
    hidden = target(hostile) | {"_target_": "${oc.select:critic.model.empty," + named + "}"}
    values = {TRUST: False, "algorithm.adv_estimator": "gae"}
    # Without the critic's model, which the doctor leaves out of verl's check, it is another.
    values |= {"critic.model.empty": ""}
    values |= {"actor_rollout_ref.actor.profiler.tool_config.hostile": hidden}
    result_with(hostile, "doctor", values)


def test_a_small_model_has_no_attention_kernel_of_another_config(tiny_model, tmp_path):
    config = json.loads((tiny_model / "config.json").read_text())
    config["_attn_implementation"] = config["attn_implementation"] = "someone/kernel"
    (tmp_path / "config.json").write_text(json.dumps(config))
    section = {"path": str(tiny_model), "hf_config_path": str(tmp_path), "trust_remote_code": False}
    write_shrunk_model(OmegaConf.create(section), tmp_path / "small")
    assert "someone/kernel" not in (tmp_path / "small" / "config.json").read_text()


@pytest.mark.parametrize("trusted", [False, True])
def test_a_dry_runs_reward_loop_trusts_a_model_as_the_job_does(
    trusted, hostile, tmp_path, monkeypatch
):
    for name in ("hf_tokenizer", "RewardLoopWorker._init_reward_fn"):
        monkeypatch.setattr(f"{reward_loop.__name__}.{name}", attrgetter(name)(reward_loop))
    config = OmegaConf.load(hostile / CONFIG)
    section = config.actor_rollout_ref.model
    section.trust_remote_code = False
    write_shrunk_model(section, tmp_path / "small")
    trust_models_as_the_job(reward_loop)
    section.update(path=str(tmp_path / "small"), trust_remote_code=trusted)
    with suppress(Exception if trusted else ()):  # what it brings is no tokenizer
        assert reward_loop.RewardLoopWorker(config).input_tokenizer is not None
    assert (tmp_path / TAKEN).exists() == trusted


def test_a_model_that_is_not_here_is_not_fetched(tmp_path):
    section = {"path": "someone/model", "trust_remote_code": False}
    with pytest.raises(PaddingConfigError, match="hf download someone/model"):
        write_shrunk_model(OmegaConf.create(section), tmp_path / "small")
