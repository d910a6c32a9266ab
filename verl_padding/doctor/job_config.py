"""The config of the job that a command is given."""

import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from warnings import catch_warnings

from omegaconf import DictConfig

from verl_padding.doctor.installation import choose_platform
from verl_padding.errors import PaddingConfigError
from verl_padding.job.composition import JobArguments, compose_job


@contextmanager
def as_a_job_would_start() -> Iterator[None]:
    """Modules beside the user are found, as by ``python -m``; what other packages print is kept out
    of the report."""
    # verl and its engines warn of much on import that is no matter of the job's.
    here = os.getcwd()
    sys.path.insert(0, here)
    disabled = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with catch_warnings(action="ignore"), redirect_stdout(sys.stderr):
            yield
    finally:
        logging.disable(disabled)
        sys.path.remove(here)


def compose_or_refuse(arguments: JobArguments) -> DictConfig:
    """verl's config with a job's overrides.

    Raises:
        PaddingConfigError: verl and Hydra refuse the overrides.
    """
    choose_platform()
    try:
        with as_a_job_would_start():
            return compose_job(arguments)
    except (Exception, SystemExit) as error:  # a broken plug-in ends a process that asks for it
        why = f"{type(error).__name__}: {' '.join(str(error).split())}"
        fix = "Correct them, unless verl-padding doctor finds the plug-in broken."
        raise PaddingConfigError(f"overrides: {why}. {fix}") from error
