"""The folder of somebody else's run, all of whose code writes a file if it is run."""

import json
import shutil

import pytest
from omegaconf import OmegaConf
from typer.testing import CliRunner

from tests.cli.test_plan import write_lines
from verl_padding.cli.app import app
from verl_padding.job.composition import JobArguments, compose_job
from verl_padding.record.run_files import CONFIG

TAKEN = "taken"
"""File that hostile code writes."""
ROWS = [{"prompt": f"p{row // 4}", "session": row % 4, "tokens": 10 + row} for row in range(32)]
AUTO_MAP = {"AutoConfig": "conf.Hostile", "AutoTokenizer": ["conf.Hostile", "conf.Hostile"]}


@pytest.fixture
def hostile(job, tiny_model, tmp_path, monkeypatch):
    """The folder of a run, with its model, each file of which would write TAKEN if it ran."""
    monkeypatch.setenv("RAY_ADDRESS", "local")
    run, model, taken = tmp_path / "run", tmp_path / "run" / "model", tmp_path / TAKEN
    shutil.copytree(tiny_model, model)
    for name in ("config.json", "tokenizer_config.json"):
        values = json.loads((model / name).read_text())
        (model / name).write_text(json.dumps(values | {"auto_map": AUTO_MAP}))
    code = (
        f"open({str(taken)!r}, 'w').close()\n"
        "from transformers import Qwen2Config\n"
        "class Hostile(Qwen2Config): pass\n"
    )
    for name in ("conf.py", "modeling.py", "tokenization.py"):
        (model / name).write_text(code)
    for name in ("pytorch_model.bin", "tokenizer.pkl", "training_args.bin"):
        (model / name).write_text(f"cos\nmkdir\n(V{taken}\ntR.")  # a pickle
    # Where the user may be: modules that packages look for.
    for name in ("hydra_plugins", "flash_attn", "apex", "vllm"):
        (run / name).mkdir()
        (run / name / "hostile.py").write_text(code)
        if name != "hydra_plugins":
            (run / name / "__init__.py").write_text(code)
    write_config(run, job, f"actor_rollout_ref.model.path={model}")
    write_lines(run / "rows.jsonl", ROWS)
    (run / "steps").mkdir()
    write_lines(run / "steps" / "3.jsonl", ROWS)
    return run


def target(run):
    """What Hydra would make: a file."""
    return {"_target_": "logging.FileHandler", "filename": str(run.parent / TAKEN)}


def write_config(run, job, *overrides, **values):
    """The config that the run has left, which trusts its model."""
    config = compose_job(JobArguments(overrides=(*job, "+padding=rows", *overrides)))
    OmegaConf.update(config, "actor_rollout_ref.model.trust_remote_code", True)
    for name, value in values.items():
        OmegaConf.update(config, name.replace("__", "."), value, force_add=True)
    path = run / CONFIG
    path.parent.mkdir(parents=True, exist_ok=True)
    OmegaConf.save(config, path)
    return path


def result_of(run, *arguments):
    """The result of a command, which ran nothing of the folder and ended without a traceback."""
    result = CliRunner().invoke(app, [*map(str, arguments)])
    assert not (run.parent / TAKEN).exists()
    assert isinstance(result.exception, SystemExit | None), result.exception
    return result


def taken(run):
    path = run.parent / TAKEN
    found = path.exists()
    path.unlink(missing_ok=True)
    return found


BUDGET = ("--budget", 100)


def fetched_by_a_shell(run):
    """A path that verl copies by a shell command."""
    return f"hdfs://a;touch {run.parent / TAKEN};echo"


def beside_a_job(hostile, monkeypatch):
    monkeypatch.chdir(hostile)
    for name in ("hydra_plugins", "flash_attn", "apex", "vllm"):  # which a job's start would find
        shutil.rmtree(hostile / name)
