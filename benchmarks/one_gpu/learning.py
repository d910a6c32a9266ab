"""A trained model learns recipes/guess, by stock verl and padded: Ray, TransferQueue, one rank, and
a rollout by transformers on the same device."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path

from benchmarks.guess import SIDES, points_of
from benchmarks.one_gpu.whole_job import ON_GPU, ROLLOUT_ON_CPU
from verl_padding.on_cpu.launch import LOG, TIMED_OUT, run_command
from verl_padding.recipes import guess
from verl_padding.recipes.guess.make_data import write_data
from verl_padding.recipes.guess.smollm2 import make_smollm2

HERE = Path(guess.__file__).parent
STEPS = 40
ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
BUDGET = 16_384
"""Tokens of a micro-batch on a GPU."""
ON_THE_DEVICE = {
    "cuda": (
        *ON_GPU,
        f"{ACTOR}.ppo_max_token_len_per_gpu={BUDGET}",
        f"{ROLLOUT}.log_prob_max_token_len_per_gpu={BUDGET}",
        "++actor_rollout_ref.model.override_config.attn_implementation=sdpa",
        "actor_rollout_ref.model.use_remove_padding=true",
        "trainer.logger=[console,file]",
        "trainer.val_before_train=false",
    ),
    "cpu": ("+local=cpu",),
}


def run(
    folder: Path, device: str, *, limit_s: float
) -> Iterator[tuple[str, dict[str, list[float]]]]:
    """Each side's points, as far as it came in half of the time.

    Raises:
        RuntimeError: a job has failed; its output is in its folder.
    """
    make_smollm2(model := folder / "smollm2")
    write_data(folder, top=15)
    (folder / "rollout_on_cpu.py").write_text(ROLLOUT_ON_CPU)
    for side, padding in SIDES.items():
        place = folder / side
        job = [
            # The group of the machine comes first: what the recipe says holds.
            *(each for each in ON_THE_DEVICE[device] if each.startswith("+local")),
            "+recipe=guess_real",
            *(each for each in ON_THE_DEVICE[device] if not each.startswith("+local")),
            *([padding] if padding else []),
            f"actor_rollout_ref.model.path={model}",
            f"data.train_files={folder / 'train.parquet'}",
            f"data.val_files={folder / 'val.parquet'}",
            f"{ROLLOUT}.agent.agent_loop_config_path={HERE / 'agent.yaml'}",
            "trainer.n_gpus_per_node=1",
            f"trainer.total_training_steps={STEPS}",
            "trainer.save_freq=-1",
            "trainer.resume_mode=disable",
            f"trainer.rollout_data_dir={place / 'run/rollouts'}",
            f"hydra.run.dir={place / 'run/hydra'}",
        ]
        (place / "run/metrics").mkdir(parents=True, exist_ok=True)
        told = [
            f"PYTHONPATH={folder}:{HERE}:{os.environ.get('PYTHONPATH', '')}",
            f"VERL_FILE_LOGGER_PATH={place / 'run/metrics/1.jsonl'}",
        ]
        if device == "cuda":
            told = ["-u", "VERL_PLATFORM", *told, "VERL_USE_EXTERNAL_MODULES=rollout_on_cpu"]
        command = ["env", *told, sys.executable, "-m", "verl.trainer.main_ppo", *job]
        code = run_command(command, folder=place, timeout_s=limit_s / 2)
        if code not in (0, TIMED_OUT):
            raise RuntimeError(f"{side}: ended with {code}\n{(place / LOG).read_text()[-3000:]}")
        yield side, points_of(place)
