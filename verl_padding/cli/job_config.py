"""The config of the job that a command is given."""

import logging
import os
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from difflib import get_close_matches
from warnings import catch_warnings

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from verl_padding.cli.doctor.installation import choose_platform
from verl_padding.errors import PaddingConfigError
from verl_padding.job.composition import (
    REMOTE_CODE,
    JobArguments,
    code_named_by_files,
    compose_job,
    has_files,
    resolved,
    settings_of,
)
from verl_padding.job.misspelt_flag import FLAG
from verl_padding.job.model_config import disable_remote_code_prompt

FLAGGED = f"+{FLAG}=fast"


@contextmanager
def quiet_imports(*, finds_modules: bool = True) -> Iterator[None]:
    """What other packages print is kept out of the report.

    Args:
        finds_modules: whether modules beside the user are found, as by ``python -m``. Without a
            job, the user may be in the folder of somebody else's run.
    """
    # verl and its engines warn of much on import that is no matter of the job's.
    here = [os.getcwd()] if finds_modules else []
    sys.path[:0] = here
    disabled = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with catch_warnings(action="ignore"), redirect_stdout(sys.stderr):
            yield
    finally:
        logging.disable(disabled)
        for folder in here:
            sys.path.remove(folder)


def compose_or_refuse(arguments: JobArguments, *, finds_modules: bool = True) -> DictConfig:
    """verl's config with a job's overrides. Code that comes with a model is off where a file and
    not the command line asks for it, which is said on standard error.

    Raises:
        PaddingConfigError: verl and Hydra refuse the overrides; or a file of configs names code in
            the place of verl's.
    """
    choose_platform()
    try:
        with quiet_imports(finds_modules=finds_modules):
            config = compose_job(arguments)
            named = {}
            disable_remote_code_prompt()
            if has_files(HydraConfig.get(), arguments):
                config = resolved(config)
                named = dict(code_named_by_files(config, arguments))
    except (Exception, SystemExit) as error:  # a broken plug-in ends a process that asks for it
        why = f"{type(error).__name__}: {' '.join(str(error).split())}"
        meant = _what_was_meant(str(error), arguments.overrides)
        fix = "Correct them, unless verl-padding doctor finds the plug-in broken."
        if re.search(rf"\b{FLAG}\b|group override|Multiple values", why):
            fix = f"Choose one of a group, such as {FLAGGED}."
        raise PaddingConfigError(meant or f"overrides: {why}. {fix}") from error
    for setting, value in named.items():
        why = f"{setting}={value}: set by a file, not by the command line"
        if not setting.endswith(REMOTE_CODE):
            raise PaddingConfigError(f"{why}. Add it there if you trust that code.")
        OmegaConf.update(config, setting, False)
        sys.stderr.write(f"{why}: off. Add it there if you trust the model's code.\n")
    return config


def _what_was_meant(error: str, overrides: Sequence[str]) -> str | None:
    """What to say in the place of Hydra's advice to append a key, which is right for none that is
    misspelt."""
    if found := re.search(r"Could not override '(\S+?)'", error):
        key = found[1]
        given = next(each for each in overrides if each.partition("=")[0] == key)
        engine = [each for each in overrides if each.startswith("model_engine=")]
        with quiet_imports():
            padded = compose_job(JobArguments(overrides=(FLAGGED, *engine)))
        known = [name for name, _ in settings_of(OmegaConf.to_container(padded))]
        ends = [each for each in known if each.endswith(f".{key}")]
        if key in known:  # of the flag, as padding.strategy
            fix = f"+{given}" if key == FLAG else FLAGGED
            return f"{given}: the job does not ask for padding. Add {fix}."
        close = ends or get_close_matches(key, known, cutoff=0.7)
        meant = [f"+{FLAG}" if each == FLAG else each for each in close]
        fix = "Correct it, or put a + before a key that your own code reads."
        if meant:
            fix = f"Did you mean {' or '.join(meant)}?"
        return f"{given}: verl and verl_padding have no such key. {fix}"
    return None
