"""The recipe on the tiny task, as overrides of a verl job on a CPU: used by the run script and the
tests."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from verl_padding.on_cpu.launch import seed_overrides
from verl_padding.on_cpu.tiny_models import TinyModelKind, make_tiny_model
from verl_padding.recipes.every_call.make_data import write_doors

HERE = Path(__file__).resolve().parent


THINKING = (
    "data.max_response_length=6",
    "actor_rollout_ref.rollout.agent.default_agent_loop=every_call_thinking",
)
"""Four tokens of reasoning, their end, and a door."""


def tiny_job(
    assets: Path, *, seed: int = 0, thinking: bool = False, family: TinyModelKind | None = None
) -> list[str]:
    """Makes model and data in ``assets`` if they are not there, and returns the overrides that name
    them.

    Args:
        seed: seed of the model's weights, the data, their order and the rollout; ``padding.seed``
            is set elsewhere.
        thinking: with a model that thinks before each answer, and forgets it afterwards.
        family: of the model; by default Qwen2, or a Qwen3 that thinks.

    ``configs/recipe/every_call_tiny.yaml`` says what is learned and how.
    """
    kind: TinyModelKind = family or ("qwen3_thinking" if thinking else "qwen2")
    model = make_tiny_model(kind, assets, seed=seed)
    train, val = write_doors(assets, seed=seed)
    return [
        "+recipe=every_call_tiny",
        f"actor_rollout_ref.model.path={model}",
        f"data.train_files={train}",
        f"data.val_files={val}",
        f"actor_rollout_ref.rollout.agent.agent_loop_config_path={HERE / 'agent.yaml'}",
        *seed_overrides(seed),
        *(THINKING if thinking else ()),
    ]


def main(
    assets: Annotated[Path, typer.Argument(help="Folder for model and data.")],
    seed: int = 0,
    thinking: bool = False,
    family: TinyModelKind | None = None,
) -> None:
    """Makes model and data, and prints the overrides, one per line."""
    overrides = tiny_job(assets.resolve(), seed=seed, thinking=thinking, family=family)
    typer.echo("\n".join(overrides))


if __name__ == "__main__":
    typer.run(main)
