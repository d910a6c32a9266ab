"""Checks a job before Ray or any worker starts: what the plug-in refuses."""

import sys
import traceback
from typing import Any

from hydra.experimental.callback import Callback
from omegaconf import DictConfig

from verl_padding.errors import PaddingError


class CheckJobBeforeStart(Callback):
    """Refuses a job with the ``padding`` group on the command line that cannot run: by
    ``sys.exit``, with a message on stderr and exit code 1, since Hydra turns an exception of a
    callback into a warning and goes on."""

    def on_job_start(self, config: DictConfig, **kwargs: Any) -> None:
        # Not on_run_start: values of ``${hydra:..}`` are not known there yet, and a multirun has
        # none.
        try:
            from verl_padding.driver.job_check import check_job

            check_job(config)
        except PaddingError as refusal:
            sys.exit(f"verl_padding: {refusal}")
        except Exception:
            # for example, of a config for another trainer; going on would train without padding
            traceback.print_exc()
            sys.exit(
                "verl_padding: the job could not be checked (see above). Leave +padding out to "
                "run it unpadded."
            )
