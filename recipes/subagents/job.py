"""The recipe on the tiny task, as overrides of a verl job on a CPU: used by the run script and the
tests."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from verl_padding.on_cpu.launch import seed_overrides
from verl_padding.on_cpu.tiny_models import make_tiny_model
from verl_padding.recipes.subagents.make_data import write_sums

HERE = Path(__file__).resolve().parent


def tiny_job(assets: Path, *, seed: int = 0) -> list[str]:
    """Makes model and data in ``assets``, if they are not there, and gives the overrides that name
    them.

    Args:
        seed: of the model's weights, the data, their order and the rollout; ``padding.seed`` goes
            with ``padding``.

    What is learned and how is in ``configs/recipe/subagents_tiny.yaml``.
    """
    model = make_tiny_model("qwen2", assets, seed=seed)
    train, val = write_sums(assets, seed=seed)
    return [
        "+recipe=subagents_tiny",
        f"actor_rollout_ref.model.path={model}",
        f"data.train_files={train}",
        f"data.val_files={val}",
        f"actor_rollout_ref.rollout.agent.agent_loop_config_path={HERE / 'agent.yaml'}",
        f"actor_rollout_ref.rollout.multi_turn.tool_config_path={HERE / 'tools.yaml'}",
        *seed_overrides(seed),
    ]


def main(
    assets: Annotated[Path, typer.Argument(help="Where model and data go.")], seed: int = 0
) -> None:
    """Makes model and data, and prints the overrides, one a line."""
    typer.echo("\n".join(tiny_job(assets.resolve(), seed=seed)))


if __name__ == "__main__":
    typer.run(main)
