"""A trained model learns recipes/guess, by stock verl and padded: Ray, TransferQueue, one rank, and
a rollout by transformers on the same device."""

import os
from collections.abc import Iterator
from pathlib import Path

from benchmarks.guess import SIDES, points_of
from benchmarks.one_gpu.whole_job import ACTOR, ON_GPU, ROLLOUT, start
from verl_padding.recipes import guess
from verl_padding.recipes.guess.make_data import write_data
from verl_padding.recipes.guess.smollm2 import make_smollm2

HERE = Path(guess.__file__).parent
STEPS = 40
BUDGET = 16_384
"""Tokens of a micro-batch on a GPU."""
ON_THE_DEVICE = {
    "cuda": (
        *ON_GPU,
        f"{ACTOR}.ppo_max_token_len_per_gpu={BUDGET}",
        f"{ROLLOUT}.log_prob_max_token_len_per_gpu={BUDGET}",
        "++actor_rollout_ref.model.override_config.attn_implementation=sdpa",
        "actor_rollout_ref.model.use_remove_padding=true",
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
    write_data(folder, top=9)
    os.environ["PYTHONPATH"] = f"{HERE}:{os.environ.get('PYTHONPATH', '')}"
    for side, padding in SIDES.items():
        place = folder / side
        # The group of the machine comes first: what the recipe says holds.
        groups = [each for each in ON_THE_DEVICE[device] if each.startswith("+local")]
        job = [
            *groups,
            "+recipe=guess_real",
            *(each for each in ON_THE_DEVICE[device] if each not in groups),
            *([padding] if padding else []),
            f"actor_rollout_ref.model.path={model}",
            f"data.train_files={folder / 'train.parquet'}",
            f"data.val_files={folder / 'val.parquet'}",
            f"{ROLLOUT}.agent.agent_loop_config_path={HERE / 'agent.yaml'}",
            f"trainer.total_training_steps={STEPS}",
            "trainer.save_freq=-1",
            "trainer.resume_mode=disable",
            f"trainer.rollout_data_dir={place / 'run/rollouts'}",
            f"hydra.run.dir={place / 'run/hydra'}",
        ]
        start(job, place / "run", timeout_s=limit_s / 2, device=device)
        yield side, points_of(place)
