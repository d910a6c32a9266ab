"""Runs verl's trainer for a few steps on a tiny model, and collects what the probe and verl have
written."""

import io
import json
import os
import random
import sys
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from unittest import mock

import pandas as pd

from tests.support import probe
from verl_padding.on_cpu.launch import LOG, run_command
from verl_padding.on_cpu.tiny_models import make_tiny_model
from verl_padding.record.run_files import ROLLOUTS, StepRows, dumps_in, read_metrics, read_step

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
ACTOR, CRITIC = "language_model", "value_model"
PROBE = "probe"  # folder of the probe's notes, in that of a job
ON_A_CPU = "tests.support.without_plugin"


@dataclass(frozen=True, kw_only=True)
class OptimizerStep:
    """Over all ranks."""

    rows: int
    real_rows: int  # those that had a token with a loss
    moved: bool  # whether the weights changed, on any rank
    nodes: list[str] = field(compare=False)  # Ray's node of each rank: another one in each job


@dataclass(frozen=True, kw_only=True)
class JobFacts:
    """What a job did, all from files it left."""

    folder: Path
    metrics: dict[int, dict]  # by step; so are the rows, from the rollout dump
    rows: dict[int, StepRows]
    optimizer_steps: dict[str, list[OptimizerStep]]  # by model, in order
    batches: list[dict]  # the batch after each local update
    queue: list[dict]  # TransferQueue after each step, before its rows are cleared
    sampled: list[dict]
    """Each batch as it was sampled, validation included: its rows in the order in which their
    sessions ended."""
    calls: list[dict]
    """Each worker call of each rank, with the tokens that each pass of its model got, if that was
    asked for."""
    log: str

    def trained_questions(self, steps):
        """What the prompts trained in some steps ask, each once a local update that trained a row
        of it."""
        return [
            text
            for note in self.batches
            if note["step"] in steps
            for text in sorted(set(note["questions"]))
        ]


def run_job(
    folder,
    *overrides,
    steps,
    probed=MappingProxyType({}),
    model_kind="qwen2",
    plugin=True,
    local="cpu",
):
    """One job on two FSDP2 ranks: 6 prompts a step, 3 sessions each, 1 to 4 rows a session.

    Args:
        probed: variables of :mod:`tests.support.probe`: what is to be killed or noted.
        plugin: whether verl loads the plug-in; without it, what runs verl on a CPU is loaded by
            name.
        local: choice of the config group ``local``.
    """
    facts = folder / PROBE
    facts.mkdir(parents=True)
    model = make_tiny_model(model_kind, folder / "models")
    data = write_data(folder, with_images=model_kind == "qwen3_vl")
    environment = environment_of_job(facts, plugin) | dict(probed)
    with mock.patch.dict(os.environ, environment):
        code = run_command(
            [
                *(sys.executable, "-m", "verl.trainer.main_ppo", f"+local={local}"),
                f"actor_rollout_ref.model.path={model}",
                f"data.train_files={data}",
                f"data.val_files={folder / 'val.parquet'}",
                "data.shuffle=false",
                "data.train_batch_size=6",
                "data.max_prompt_length=64",
                "data.max_response_length=6",
                "actor_rollout_ref.actor.ppo_mini_batch_size=2",
                "actor_rollout_ref.rollout.n=3",
                "actor_rollout_ref.actor.optim.lr=1e-3",
                f"actor_rollout_ref.rollout.agent.agent_loop_config_path={HERE / 'agent.yaml'}",
                "actor_rollout_ref.rollout.agent.default_agent_loop=varying_turns",
                "algorithm.adv_estimator=grpo",
                f"trainer.total_training_steps={steps}",
                "trainer.resume_mode=disable",
                f"trainer.rollout_data_dir={folder / ROLLOUTS}",
                f"hydra.run.dir={folder / 'hydra'}",
                *([] if plugin else ["hydra.searchpath=[pkg://verl_padding.configs]"]),
                *overrides,
            ],
            folder=folder,
            timeout_s=3000,
        )
    log = (folder / LOG).read_text()
    assert (code == 0) == (probe.KILL not in probed), log[-5000:]
    return JobFacts(
        folder=folder,
        metrics=dict(read_metrics(folder)),
        rows={rows.step: rows for rows in map(read_step, dumps_in(folder / ROLLOUTS))},
        log=log,
        **read_probe(facts),
    )


def environment_of_job(facts, plugin):
    """What has verl load the probe, and the plug-in or what it needs on a CPU without it."""
    modules = [*([] if plugin else [ON_A_CPU]), "tests.support.probe"]
    return {
        probe.FOLDER: str(facts),
        "VERL_USE_EXTERNAL_MODULES": ",".join(modules),
        "VERL_USE_EXTERNAL_PLUGINS": "auto" if plugin else "none",
        "PYTHONPATH": str(ROOT),
    }


def write_data(folder, *, with_images):
    """Prompts of a training job, each its own number, and five of them for validation."""
    data = folder / "train.parquet"
    rows = [
        {
            "data_source": "letters",
            "prompt": [{"role": "user", "content": f"{index}?"}],
            "ability": "letters",
            "reward_model": {"style": "rule", "ground_truth": ""},
            "extra_info": {"index": index},
        }
        for index in range(512)
    ]
    for row in rows if with_images else ():
        row["prompt"][0]["content"] = "<image>" + row["prompt"][0]["content"]
        row["images"] = [{"bytes": _picture(row["extra_info"]["index"])}]
    pd.DataFrame(rows).to_parquet(data)
    pd.DataFrame(rows[:5]).to_parquet(folder / "val.parquet")
    return data


def _picture(seed):
    """64 x 64 pixels, or twice as many: 4 or 8 tokens."""
    from PIL import Image

    draw, file = random.Random(seed), io.BytesIO()
    size = 64 * draw.randint(1, 2), 64
    Image.frombytes("RGB", size, draw.randbytes(3 * size[0] * size[1])).save(file, "PNG")
    return file.getvalue()


def read_probe(folder):
    """What the probe has noted."""
    notes = [
        json.loads(line)
        for path in sorted(folder.glob("*.jsonl"))
        for line in path.read_text().splitlines()
    ]

    by_rank = defaultdict(list)
    for note in notes:
        if note["kind"] == "optimizer_step":
            by_rank[note["model"], note["rank"]].append(note)
    steps = {
        model: [
            OptimizerStep(
                rows=sum(note["rows"] for note in rank_notes),
                real_rows=sum(note["real_rows"] for note in rank_notes),
                moved=any(note["moved"] for note in rank_notes),
                nodes=[note["node"] for note in rank_notes],
            )
            for rank_notes in zip(
                *(by_rank[key] for key in sorted(by_rank) if key[0] == model), strict=True
            )
        ]
        for model in {model for model, _ in by_rank}
    }
    kinds = {"batches": "batch", "queue": "queue", "sampled": "sampled", "calls": "call"}
    return {"optimizer_steps": steps} | {
        name: [note for note in notes if note["kind"] == kind] for name, kind in kinds.items()
    }
