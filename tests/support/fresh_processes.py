"""Processes that have imported nothing of verl or of ours, a few for the price of one.

They are copies, one after the other, of a process that has imported what verl needs of others and no test asks about:
most of what a process of verl's takes is spent there.
"""

import json
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

COPIES = """
import json, os, sys, threading
import fastapi, pandas, ray, tensordict, torch.distributed.fsdp
assert threading.active_count() == 1, "a copy would be without them"
assert not {"verl", "verl_padding", "transformers", "wrapt"} & set(sys.modules)
folder = sys.argv[1]
for name, case in json.load(sys.stdin).items():
    child = os.fork()
    if child == 0:
        break
    print(json.dumps([name, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])]), flush=True)
else:
    sys.exit()
for number, stream in ((0, os.devnull), (1, f"{folder}/{name}.out"), (2, f"{folder}/{name}.err")):
    os.dup2(os.open(stream, os.O_CREAT | (os.O_WRONLY if number else os.O_RDONLY)), number)
for variable, value in case["environment"].items():
    os.environ.pop(variable, None) if value is None else os.environ.update({variable: value})
os.chdir(case["folder"])
sys.argv = ["-c", *case["arguments"]]
exec(compile(case["code"], "<string>", "exec"), {"__name__": "__main__"})
"""


@dataclass(frozen=True)
class Fresh:
    """What runs in a process of its own.

    Args:
        arguments: of its command line.
        environment: variables that it has otherwise; None for one that it has not.
    """

    code: str
    arguments: list[str] = field(default_factory=list)
    environment: Mapping[str, str | None] = field(default_factory=dict)
    folder: str = "."


def run_fresh(cases: Mapping[str, Fresh], folder: Path) -> dict[str, subprocess.CompletedProcess[str]]:
    """The process of each case after its end; ``folder`` keeps what they say."""
    result = subprocess.run(
        [sys.executable, "-c", COPIES, str(folder)],
        input=json.dumps({name: asdict(case) for name, case in cases.items()}),
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    exit_codes = dict(map(json.loads, result.stdout.splitlines()))
    return {
        name: subprocess.CompletedProcess(
            name, exit_codes[name], (folder / f"{name}.out").read_text(), (folder / f"{name}.err").read_text()
        )
        for name in cases
    }
