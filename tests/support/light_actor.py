"""An actor whose process imports nothing but Ray: the module of an actor's class is imported
there."""

import os
import time

import ray


@ray.remote(num_cpus=0.1)
class Worker:
    """Says who it is, and waits."""

    def pid(self) -> int:
        return os.getpid()

    def work(self, seconds: float) -> None:
        time.sleep(seconds)
