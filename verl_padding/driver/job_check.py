"""The check of a job before it starts: what would go wrong in silence, or is about pads, is
refused."""

from contextlib import suppress

from omegaconf import DictConfig

from verl_padding.config import PaddingConfig
from verl_padding.driver.advantages import check_advantages_stay_with_rows
from verl_padding.driver.agent_roles import check_baseline
from verl_padding.errors import refuse
from verl_padding.job.engine_refusals import check_adapters
from verl_padding.job.loss_weightings import check_losses
from verl_padding.job.model_config import config_path, folder_here
from verl_padding.job.modes import SEPARATE_ASYNC, check_mode
from verl_padding.job.vendor import check_vendor_reaches_workers
from verl_padding.job.verl_check import check_verl
from verl_padding.job.verl_job import VerlJob
from verl_padding.job.verl_losses import check_names


def check_job(config: DictConfig) -> VerlJob:
    """The job of a config; one that cannot run is refused by a PaddingConfigError, before any
    worker starts.

    The one door of trainer, Hydra's callback and commands.
    """
    # Importing it makes the padded trainers, which import this module.
    from verl.trainer.ppo.v1.trainer_base import TRAINER_REGISTRY

    check_verl(config)
    if config.get("padding") is None:  # of a trainer of one's own
        refuse("padding=None", "a padded trainer needs this section", "Add +padding=fast.")
    padding = PaddingConfig.from_section(config.get("padding"))
    check_vendor_reaches_workers(config)
    why = "padded trainers extend only verl's v1 trainers"
    if (async_training := config.get("async_training")) is not None:
        refuse(f"async_training={async_training}", why, "Leave it out.")
    if not config.trainer.use_v1:
        refuse("trainer.use_v1=False", why, "Set it to True.")
    name = config.trainer.v1.trainer_mode
    # The mode that a padded trainer extends; by its name where it is one of verl's.
    mode = getattr(TRAINER_REGISTRY.get(name), "extends", None) or check_mode(name)
    check_names(config)
    check_losses(config, padding)
    check_baseline(config, padding)
    job = VerlJob(config, padding, mode)
    if job.parameter_sync_step != 1 and job.mode != SEPARATE_ASYNC:
        setting = f"trainer.v1.{job.mode}.parameter_sync_step={job.parameter_sync_step}"
        why = "the rollout sleeps after the first local update, and the next would wait forever"
        refuse(setting, why, f"Set it to 1, or trainer.v1.trainer_mode={SEPARATE_ASYNC}.")
    check_verl(config, {engine.strategy for engine in job.engines.values()})
    check_adapters(config, job.mode, job.engines.values())
    model = config.actor_rollout_ref.model
    # A model that has to be fetched first is checked by the trainer, once verl has fetched it.
    if folder_here(config_path(model)):
        # Code that comes with a model may need packages that only the training machines have.
        with suppress(ImportError):
            job.check_models(fetched=False)
    check_advantages_stay_with_rows(config)
    return job
