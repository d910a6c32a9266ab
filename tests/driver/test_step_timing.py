"""What a job learns from its clocks, with laps that no worker has taken."""

import logging
import random
from types import SimpleNamespace

import pytest

from tests.timing.test_laps import lap
from verl_padding.config import PaddingConfig
from verl_padding.driver.step_timing import StepTiming
from verl_padding.plan import Job, Pass, Update
from verl_padding.timing.laps import Lap
from verl_padding.worker.micro_batch_clock import LAPS

CALLS = ("log_prob", "actor")


class Workers:
    """Tell laps of micro-batches that are all about equally full."""

    def __init__(self):
        self.draw = random.Random(0)

    def execute_with_func_generator(self, function):
        return SimpleNamespace(non_tensor_batch={LAPS: [self.lap(call, k) for call in CALLS for k in range(12)]})

    def lap(self, call: str, micro_batch: int) -> Lap:
        tokens = tuple(self.draw.randint(200, 700) for _ in range(8))
        seconds = (0.01 + 1e-5 * sum(tokens)) * self.draw.uniform(0.98, 1.02)
        return lap(0, micro_batch, seconds, seconds, tokens, call=call, start_s=float(CALLS.index(call)))


@pytest.mark.parametrize(("as_update", "calls"), [("actor", ["actor"]), (None, ["log_prob", "actor"])])
def test_a_pass_tries_another_fill_only_if_it_has_micro_batches_of_its_own(as_update, calls, caplog):
    job = Job(
        strategy="rows",
        prompts=8,
        sessions_per_prompt=2,
        updates={"actor": Update(dp_size=1, token_budget=8192, prompts_per_mini_batch=4)},
        inference={"log_prob": Pass(dp_size=1, token_budget=8192, as_update=as_update)},
        packer="plan",
    )
    config = SimpleNamespace(trainer=SimpleNamespace(default_local_dir=".", resume_mode="disable"))
    timing = StepTiming(config, PaddingConfig(packer="plan", cost_model="measured"), [Workers()])
    with caplog.at_level(logging.WARNING):
        for step in (1, 2):
            timing.with_learned_costs(job)
            timing.read(step, [])
    priced = timing.with_learned_costs(job)
    assert [name for name in CALLS if f" tokens in {name}," in caplog.text] == calls
    assert [name for name in CALLS if getattr(dict(priced.calls())[name].cost_model, "trial_fill", 0)] == calls
