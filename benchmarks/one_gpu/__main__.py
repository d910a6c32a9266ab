"""Runs one part: ``python -m benchmarks.one_gpu learn|exact|speed|job --out FOLDER``; README.md
has more."""

import os
import subprocess
import tempfile
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

import typer

from benchmarks.results import VERSIONS

METRICS = (
    "actor/grad_norm",
    "training/rollout_probs_diff_max",
    "padding/actor/sharing_factor",
    "timing_s/step",
)


def main(
    part: str,
    out: Path = Path("out"),
    device: str = "cuda",
    rounds: int = 5,
    seconds: float = 200,
) -> None:
    """A CPU computes small models; no new round begins after so many ``seconds``."""
    one_rank = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
    os.environ |= one_rank | {
        "MASTER_PORT": str(20_000 + os.getpid() % 9_000),
        "TOKENIZERS_PARALLELISM": "false",
    }
    if device == "cpu":
        os.environ["VERL_PLATFORM"] = "cpu"
    from benchmarks.one_gpu import exact, learning, speed, whole_job
    from benchmarks.one_gpu.figures import Figures

    figures = Figures(part, out)
    figures.keep("begins", **machine(device))
    with tempfile.TemporaryDirectory() as folder:
        if part == "learn":
            for side, points in learning.run((out / "learn").resolve(), device, limit_s=seconds):
                figures.keep("run", side=side, **points)
        elif part == "exact":
            exact.measure(figures, Path(folder), device)
        elif part == "speed":
            speed.measure(figures, Path(folder), device, rounds, seconds)
        else:
            for step in whole_job.run((out / "job").resolve(), timeout_s=seconds):
                figures.keep("step", **{name: step.get(name) for name in METRICS})
    figures.keep("done")


def machine(device: str) -> dict[str, object]:
    """The card and the versions that figures are of."""
    import torch

    card, driver = "cpu", ""
    if device == "cuda":
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "--id=0"]
        card = torch.cuda.get_device_name()
        driver = subprocess.run(query, capture_output=True, text=True, check=True).stdout.strip()
    return {
        "card": card,
        "driver": driver,
        "measured": datetime.now(UTC).strftime("%Y-%m-%d"),
        "versions": {name: version(name) for name in VERSIONS},
    }


if __name__ == "__main__":
    typer.run(main)
