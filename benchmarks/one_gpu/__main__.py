"""Runs one part: ``python -m benchmarks.one_gpu {exact,speed,job,collect} --out FOLDER``; README.md has more."""

import argparse
import os
import subprocess
import sys
import tempfile
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

VERSIONS = ("torch", "verl", "transformers", "ray", "tensordict")
METRICS = ("actor/grad_norm", "training/rollout_probs_diff_max", "padding/actor/sharing_factor", "timing_s/step")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("part", choices=["exact", "speed", "job", "collect"])
    parser.add_argument("--out", type=Path, default=Path("out"))
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"], help="a CPU computes small models")
    parser.add_argument("--width", default="0.5B", choices=["0.5B", "1.5B"])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=200, help="no new round begins after as many")
    options = parser.parse_args()
    one_rank = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
    os.environ |= one_rank | {"MASTER_PORT": str(20_000 + os.getpid() % 9_000), "TOKENIZERS_PARALLELISM": "false"}
    if options.device == "cpu":
        os.environ["VERL_PLATFORM"] = "cpu"
    from benchmarks.one_gpu.figures import Figures, collect

    if options.part == "collect":
        print(collect(options.out, Path(__file__).parent))
        return
    figures = Figures(options.part, options.out)
    figures.keep("begins", **machine(options.device), command=" ".join(sys.argv[1:]))
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        if options.part == "exact":
            from benchmarks.one_gpu import exact

            for _ in exact.measure(figures, folder, options.device):
                pass
        elif options.part == "speed":
            from benchmarks.one_gpu import speed

            width = options.width if options.device == "cuda" else "small"
            speed.measure(figures, folder, options.device, width, options.rounds, options.seconds)
        else:
            from benchmarks.one_gpu import whole_job

            place = (options.out / "job").resolve()
            for step in whole_job.run(place, options.device, timeout_s=options.seconds):
                figures.keep("step", **{name: step.get(name) for name in METRICS})
    figures.keep("done")


def machine(device: str) -> dict[str, object]:
    """The card and the versions that figures are of."""
    import torch

    measured = {
        "measured": datetime.now(UTC).strftime("%Y-%m-%d"),
        "versions": {name: version(name) for name in VERSIONS},
    }
    if device == "cpu":
        return {"card": "cpu", "driver": None} | measured
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "--id=0"]
    driver = subprocess.run(query, capture_output=True, text=True, check=True).stdout.strip()
    return {"card": torch.cuda.get_device_name(), "driver": driver} | measured


if __name__ == "__main__":
    main()
