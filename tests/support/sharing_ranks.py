"""verl's Megatron and VeOmni engines on ranks of processes of their own, in float64: micro-batches
of one row each, beside those whose shared tokens are computed once.

    RANK=0 WORLD_SIZE=2 python -m tests.support.sharing_ranks FOLDER

reads ``FOLDER/cases.json`` (name -> :class:`Case`), and rank 0 writes ``FOLDER/found.json``.
:func:`run_cases` starts the ranks. Parallel sizes of Megatron change between the cases of a start.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist

TEMPERATURE = 0.9
RANKS_TAKE_S = 900
"""Seconds after which ranks hang."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """An engine, and the rows that it computes."""

    engine: str = "megatron"
    kind: str = "qwen3"
    update: str = "actor"
    sizes: Mapping[str, int] = field(default_factory=dict)
    """Parallel sizes, by their settings."""
    overrides: tuple[str, ...] = ()
    """Other settings; ``{role}`` and ``{engine}`` are their sections, ``{transformer}`` is that of
    Megatron's own settings."""
    rows: str = "branching"
    cuts: tuple[str, ...] = ("prompts", "all")
    """Micro-batches of rows that share: one a prompt, or one of all rows."""
    temperatures: bool = False
    """Whether rows have two of them."""


def run_cases(
    cases,
    ranks,
    folder,
    dtype="float64",
    platform="cpu",
):
    """What each case found on verl's platform: name of a cut -> largest differences from rows
    alone; an exception if a rank ends with one, or all of them take too long."""
    from tests.support.sharing_rows import make_model

    folder.mkdir(exist_ok=True)
    for kind in sorted({case.kind for case in cases.values()}):
        make_model(kind, folder.parent, dtype)
    text = json.dumps({name: asdict(case) for name, case in cases.items()})
    (folder / "cases.json").write_text(text)
    common = {"VERL_PLATFORM": platform, "VERL_ENGINE_DEVICE": "cpu"}
    common |= {"OMP_NUM_THREADS": "1", "TQ_NUM_THREADS": "1"}
    common |= {"VERL_LOGGING_LEVEL": "ERROR", "WORLD_SIZE": str(ranks), "DTYPE": dtype}
    common |= {"LOCAL_WORLD_SIZE": str(ranks), "MODELING_BACKEND": "veomni"}
    command = [sys.executable, "-W", "ignore", "-m", "tests.support.sharing_ranks", str(folder)]
    logs = [(folder / f"{rank}.log").open("w") for rank in range(ranks)]
    processes = [
        subprocess.Popen(
            command,
            env=os.environ | common | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=logs[rank],
            stderr=subprocess.STDOUT,
        )
        for rank in range(ranks)
    ]
    end = time.monotonic() + RANKS_TAKE_S
    try:
        while any(process.poll() is None for process in processes):
            if any(process.poll() for process in processes) or time.monotonic() > end:
                break
            time.sleep(0.2)
    finally:
        for process in processes:
            process.kill()
            process.wait()
        for log in logs:
            log.close()
    if any(process.returncode for process in processes):
        tails = [(folder / f"{rank}.log").read_text()[-4000:] for rank in range(ranks)]
        raise ChildProcessError("\n\n".join(tails))
    return json.loads((folder / "found.json").read_text())


def assert_exact(found, tolerance):
    """All that a case found is off rows alone by rounding at most, and less was computed."""
    for cut, differences in found.items():
        tokens, alone = (differences.pop(name, None) for name in ("tokens", "tokens_alone"))
        if tokens is not None:
            assert tokens < alone, cut
        assert {"log_probs", "values"} & differences.keys(), cut
        wrong = {name: value for name, value in differences.items() if not value <= tolerance}
        assert not wrong, (cut, wrong)


def compute_in_float64():
    """All that is float32 from now on in this process is float64."""
    from megatron.core.optimizer.optimizer_config import OptimizerConfig
    from verl.utils import torch_dtypes

    from tests.support.engines.megatron.engines import answer_for_cuda

    answer_for_cuda()
    type_of = torch.Tensor.type

    def type_as_float(self, dtype=None, *args, **kwargs):
        found = type_of(self, dtype, *args, **kwargs)
        return found.replace("Double", "Float") if dtype is None else found

    for cls in OptimizerConfig.__mro__[:-1]:
        init = cls.__init__
        init.__defaults__ = tuple(
            torch.float64 if value is torch.float32 else value for value in init.__defaults__
        )
    torch_dtypes.FLOAT_LIST.append(torch.float64)
    in_float64()
    torch.Tensor.type = type_as_float


def in_float64():
    torch.set_default_dtype(torch.float64)
    torch.float32 = torch.float = torch.float64
    torch.Tensor.float = torch.Tensor.double


def main(folder):
    from verl_padding import on_cpu  # noqa: F401

    torch.set_num_threads(1)
    import tests.support.engines  # noqa: F401

    cases = json.loads((folder / "cases.json").read_text())
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = dist.FileStore(str(folder / "store"), ranks)
    on_gpu = "" if os.environ["VERL_PLATFORM"] == "cpu" else ",cuda:nccl"
    dist.init_process_group(f"cpu:gloo{on_gpu}", store=store, rank=rank, world_size=ranks)
    is_double = os.environ["DTYPE"] == "float64"
    if is_double:
        is_megatron = any(case["engine"] == "megatron" for case in cases.values())
        (compute_in_float64 if is_megatron else in_float64)()
    from tests.support.sharing_engines import SharingRanks

    found = {}
    for name, given in cases.items():
        case = Case(**given)
        print(name, flush=True)
        differences = SharingRanks(case, folder.parent, os.environ["DTYPE"]).compare()
        by_rank = [None] * ranks
        dist.all_gather_object(by_rank, differences)
        found[name] = {
            cut: {
                what: max(each[cut][what] for each in by_rank if what in each[cut])
                for what in dict.fromkeys(what for each in by_rank for what in each[cut])
            }
            for cut in differences
        }
    if rank == 0:
        (folder / "found.json").write_text(json.dumps(found))
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # gloo's threads may outlive the groups


if __name__ == "__main__":
    main(Path(sys.argv[1]))
