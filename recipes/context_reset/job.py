"""The recipe on the tiny task, as overrides of a verl job on a CPU: used by the demo, the run
script and the tests."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from verl_padding.on_cpu.launch import seed_overrides
from verl_padding.on_cpu.tiny_models import make_tiny_model
from verl_padding.recipes.context_reset.make_data import write_paths

HERE = Path(__file__).resolve().parent


def tiny_job(assets: Path, *, seed: int = 0, images: bool = False) -> list[str]:
    """Makes model and data in ``assets`` if they are not there, and returns the overrides that name
    them.

    Args:
        seed: seed of the model's weights, the data, their order and the rollout; ``padding.seed``
            is set elsewhere.
        images: use a vision model, and sessions that start with an image; this needs the extra
            ``vision``.

    ``configs/recipe/context_reset_tiny.yaml`` says what is learned and how.
    """
    model = make_tiny_model("qwen3_vl" if images else "qwen2", assets, seed=seed)
    train, val = write_paths(assets, seed=seed, images=images)
    return [
        "+recipe=context_reset_tiny",
        f"actor_rollout_ref.model.path={model}",
        f"data.train_files={train}",
        f"data.val_files={val}",
        f"actor_rollout_ref.rollout.agent.agent_loop_config_path={HERE / 'agent.yaml'}",
        *seed_overrides(seed),
    ]


def main(
    assets: Annotated[Path, typer.Argument(help="Folder for model and data.")],
    images: bool = False,
    seed: int = 0,
) -> None:
    """Makes model and data, and prints the overrides, one per line."""
    typer.echo("\n".join(tiny_job(assets.resolve(), images=images, seed=seed)))


if __name__ == "__main__":
    typer.run(main)
