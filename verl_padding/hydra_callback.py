"""Checks a job with the ``padding`` group on the command line, before Ray or any worker starts."""

import sys
import traceback
from typing import Any

from hydra.experimental.callback import Callback
from omegaconf import DictConfig

from verl_padding.errors import PaddingError
from verl_padding.job import MODE_PREFIX, STOCK_MODES, check_job, stock_mode


class CheckJobBeforeStart(Callback):
    """Raises a stock trainer mode to its padded counterpart and refuses a job that cannot run.

    Hydra turns an exception of a callback into a warning and goes on, so a refusal leaves by
    ``sys.exit``, with its message on stderr and exit code 1.
    """

    def on_run_start(self, config: DictConfig, **kwargs: Any) -> None:
        _exit_if_refused(config)

    def on_job_start(self, config: DictConfig, **kwargs: Any) -> None:
        # Runs after on_run_start, where it finds nothing new, and alone in a multirun.
        _exit_if_refused(config)


def raise_to_padded(config: DictConfig) -> str:
    """Puts the padded counterpart in the place of a stock trainer mode; returns the verl mode that the job extends.

    Raises:
        PaddingConfigError: a trainer that pads nothing, or that nobody knows.
    """
    mode: str = config.trainer.v1.trainer_mode
    if mode in STOCK_MODES:
        config.trainer.v1.trainer_mode = MODE_PREFIX + mode
        return mode
    if mode.startswith(MODE_PREFIX):
        return stock_mode(mode)
    # Only now: it imports verl's trainers, which takes seconds.
    from verl_padding.trainer.trainers import extended_mode

    return extended_mode(mode)


def _exit_if_refused(config: DictConfig) -> None:
    try:
        check_job(config, raise_to_padded(config))
    except PaddingError as refusal:
        sys.exit(f"verl_padding: {refusal}")
    except Exception:
        # A config that is none of verl's v1 trainers', for one. Going on would be training without padding.
        traceback.print_exc()
        sys.exit(
            "verl_padding: the job could not be checked (the reason is above). Leave +padding out to run it without."
        )
