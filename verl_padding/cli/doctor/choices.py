"""Names that a job chooses by, asked of verl's own registries and code."""

import inspect
import re
from collections.abc import Collection, Iterator

from omegaconf import DictConfig, ListConfig, OmegaConf

from verl_padding.cli.doctor.files import AGENT, EXTERNAL_LIB, FIX_MODULE, own_agent_loops
from verl_padding.cli.doctor.finding import Finding, wrong
from verl_padding.cli.doctor.keys import verls_code
from verl_padding.errors import suggestion

ROLLOUT = "actor_rollout_ref.rollout"


def import_external_lib(config: DictConfig, section: str) -> Iterator[Finding]:
    """Imports the modules of a model's ``external_lib``, as verl does with its config: they may
    register names."""
    from verl.utils.import_utils import import_external_libs

    setting = f"{section}.{EXTERNAL_LIB}"
    named = OmegaConf.select(config, setting)
    try:
        import_external_libs(list(named) if isinstance(named, ListConfig) else named)
    except Exception as error:  # of the user's module
        why = f"{named}: cannot be imported ({type(error).__name__}: {error})"
        yield wrong(setting, f"{why}. {FIX_MODULE}")


def agent_loops(config: DictConfig) -> list[str]:
    """Names of the agent loops that a job's workers will know."""
    from verl.experimental.agent_loop.agent_loop import _agent_loop_registry

    return [*_agent_loop_registry, *own_agent_loops(config)]


def choices(config: DictConfig) -> dict[str, Collection[str]]:
    """Setting -> names that verl has for it, those that a job registers among them."""
    from verl.trainer.ppo import core_algos
    from verl.workers.rollout.base import _ROLLOUT_REGISTRY

    # Names that are compared one by one; "full" is not implemented.
    kl_names = re.findall(r'"(\w+)"', inspect.getsource(core_algos.kl_penalty_forward))
    penalties = [name + plus for name in kl_names if name != "full" for plus in ("", "+")]
    return {
        "trainer.resume_mode": re.findall(r'resume_mode == "(\w+)"', verls_code()),
        "algorithm.adv_estimator": [str(name) for name in core_algos.ADV_ESTIMATOR_REGISTRY],
        "algorithm.kl_penalty": penalties,
        "actor_rollout_ref.actor.kl_loss_type": penalties,
        "actor_rollout_ref.actor.policy_loss.loss_mode": core_algos.POLICY_LOSS_REGISTRY,
        f"{AGENT}.default_agent_loop": agent_loops(config),
        f"{ROLLOUT}.name": [name for name, _ in _ROLLOUT_REGISTRY],
    }


def unknown_choices(config: DictConfig) -> Iterator[Finding]:
    """Names that verl does not know, and would find out only in the first step."""
    for setting, names in choices(config).items():
        name = OmegaConf.select(config, setting, throw_on_missing=False)
        if name is not None and name not in names:
            why = f"{name}: neither verl nor the job registers it"
            yield wrong(setting, f"{why}. {suggestion(str(name), names)}")
