"""Which of the methods that the padded trainers override verl has called in a step.

A verl that calls another method in the place of one of them would train without what the plug-in
adds there, and without an error.
"""

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar, cast

from verl_padding.errors import refuse
from verl_padding.job.verl_check import FIX
from verl_padding.job.verl_source import installed_verl

Method = TypeVar("Method", bound=Callable[..., Any])

TRACKED = "_verl_padding_tracked"
"""Attribute of a :func:`tracked` method."""
SET_UP = ("_init_tokenizer", "_build_replay_buffer")
UPDATE = ("_balance_batch", "_compute_old_log_prob", "_compute_advantage")
"""Once in each local update, in every mode."""
PROMPTS, CHECKPOINT = "_fetch_one_gen_batch", "_save_checkpoint"
STEP = ("step", "_step_once")
METRICS = "_compute_metrics"
WAY_TO_PROMPTS = ("prepare_step", "_add_batch_to_generate", "_next_train_batch")
"""By which verl comes to :data:`PROMPTS` in each step, whatever else it does."""


class CalledMethods:
    """The tracked methods of a trainer that have been called in the step that runs."""

    def __init__(self, trainer: Any):
        self._trainer = trainer
        self._called: set[str] = set()

    def note(self, method: str) -> None:
        """Notes that a method has been called."""
        if method == "step":
            if {"fit", "step"} <= self._called:
                self.check_metrics_ran()
            self._called -= {*STEP, METRICS, CHECKPOINT}
        if method == "_step_once":
            self._called -= {*UPDATE}
        self._called.add(method)

    def end_local_update(self) -> None:
        """Refuses a local update that came without one of its methods."""
        prompts = PROMPTS if all(map(self._is_verls, WAY_TO_PROMPTS)) else ""
        self._require("a local update", *SET_UP, prompts, "step", *UPDATE)

    def end_step(self, *, checkpointed: bool) -> None:
        """Refuses a global step that came without one of its methods."""
        self._require("a step", *STEP, CHECKPOINT if checkpointed else "")

    def check_metrics_ran(self) -> None:
        """Refuses a global step whose metrics have not been computed, once verl goes on."""
        self._require("a step", METRICS)

    def _require(self, period: str, *methods: str) -> None:
        if missing := [name for name in methods if name and self._is_missing(name)]:
            refuse(
                f"verl=={installed_verl().version}",
                f"{period} ended without a call of {', '.join(missing)} of "
                f"{type(self._trainer).__name__}, on which padding depends",
                FIX,
            )

    def _is_missing(self, method: str) -> bool:
        # Of a method that a user's own trainer overrides, calling ours is the user's business.
        return method not in self._called and hasattr(getattr(type(self._trainer), method), TRACKED)

    def _is_verls(self, method: str) -> bool:
        own = getattr(type(self._trainer), method, None)
        return getattr(own, "__module__", "verl").split(".")[0] == "verl"


def tracked(method: Method) -> Method:
    """A method of a trainer whose ``called_methods`` note each call of it."""

    @wraps(method)
    def noted(self: Any, *args: Any, **kwargs: Any) -> Any:
        self.called_methods.note(method.__name__)
        return method(self, *args, **kwargs)

    setattr(noted, TRACKED, True)
    return cast(Method, noted)
