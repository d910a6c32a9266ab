"""Receipts of a step: which of verl's methods that the padded trainers override have been called.

A verl that calls another method in the place of one of them would train without what the plug-in
adds there, and without an error.
"""

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar, cast

from verl_padding.job.incompatibility import refuse
from verl_padding.job.verl_check import FIX
from verl_padding.job.verl_source import installed_verl

Method = TypeVar("Method", bound=Callable[..., Any])

STAMPS = "_verl_padding_stamps"
"""Attribute of a method that leaves a receipt."""
SET_UP = ("_init_tokenizer", "_build_replay_buffer")
UPDATE = ("_balance_batch", "_compute_old_log_prob", "_compute_advantage")
"""Once in each local update, in every mode."""
PROMPTS, SAVED = "_fetch_one_gen_batch", "_save_checkpoint"
STEP = ("step", "_step_once")
METRICS = "_compute_metrics"
WAY_TO_PROMPTS = ("prepare_step", "_add_batch_to_generate", "_next_train_batch")
"""By which verl comes to :data:`PROMPTS` in each step, whatever else it does."""


class Receipts:
    """The receipts of a trainer's step that runs."""

    def __init__(self, trainer: Any):
        self._trainer = trainer
        self._came: set[str] = set()

    def stamp(self, method: str) -> None:
        """Notes that a method has been called."""
        if method == "step":
            if {"fit", "step"} <= self._came:
                self.check_metrics_ran()
            self._came -= {*STEP, METRICS, SAVED}
        if method == "_step_once":
            self._came -= {*UPDATE}
        self._came.add(method)

    def end_local_update(self) -> None:
        """Refuses a local update that came without one of its methods."""
        prompts = PROMPTS if all(map(self._is_verls, WAY_TO_PROMPTS)) else ""
        self._expect("a local update", *SET_UP, prompts, "step", *UPDATE)

    def end_step(self, *, saved: bool) -> None:
        """Refuses a global step that came without one of its methods."""
        self._expect("a step", *STEP, SAVED if saved else "")

    def check_metrics_ran(self) -> None:
        """Refuses a global step whose metrics have not been computed, once verl goes on."""
        self._expect("a step", METRICS)

    def _expect(self, what: str, *methods: str) -> None:
        if missing := [each for each in methods if each and self._is_missing(each)]:
            refuse(
                f"verl=={installed_verl().version}",
                f"{what} ended without a call of {', '.join(missing)} of "
                f"{type(self._trainer).__name__}, on which padding depends",
                FIX,
            )

    def _is_missing(self, method: str) -> bool:
        # Of a method that a user's own trainer overrides, calling ours is the user's business.
        return method not in self._came and hasattr(getattr(type(self._trainer), method), STAMPS)

    def _is_verls(self, method: str) -> bool:
        own = getattr(type(self._trainer), method, None)
        return getattr(own, "__module__", "verl").split(".")[0] == "verl"


def leaves_receipt(method: Method) -> Method:
    """A method of a trainer that leaves a receipt in its ``receipts`` when it is called."""

    @wraps(method)
    def stamped(self: Any, *args: Any, **kwargs: Any) -> Any:
        self.receipts.stamp(method.__name__)
        return method(self, *args, **kwargs)

    setattr(stamped, STAMPS, True)
    return cast(Method, stamped)
