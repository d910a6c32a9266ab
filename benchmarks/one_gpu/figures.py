"""Figures that are kept line by line, as soon as they are there: a part that is stopped leaves what
it has shown."""

import json
import time

import torch

STARTED = time.perf_counter()


class Figures:
    """The results of a part, in ``<folder>/results.jsonl`` and on standard output."""

    def __init__(self, part, folder):
        self.part, self._file = part, folder / "results.jsonl"
        folder.mkdir(parents=True, exist_ok=True)

    def keep(self, what, **figures):
        line = json.dumps({"part": self.part, "what": what} | figures)
        print(line, flush=True)
        with self._file.open("a") as file:
            file.write(line + "\n")


def seconds():
    """Since the process began."""
    return time.perf_counter() - STARTED


def timed(call, on_gpu):
    """What a call returns, and its seconds."""
    if on_gpu:
        torch.cuda.synchronize()
    begun = time.perf_counter()
    output = call()
    if on_gpu:
        torch.cuda.synchronize()
    return output, time.perf_counter() - begun
