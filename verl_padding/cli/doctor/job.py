"""All that is checked in a job, the cheap things first."""

from collections.abc import Generator, Iterator
from math import prod
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig, OmegaConf

from verl_padding.cli.doctor.choices import import_external_lib, unknown_choices
from verl_padding.cli.doctor.data import data_findings
from verl_padding.cli.doctor.files import EXTERNAL_LIB, files_and_modules
from verl_padding.cli.doctor.finding import Finding, hint, ok, run_check, warning, wrong
from verl_padding.cli.doctor.keys import (
    ignored_settings,
    legacy_rewards,
    unread_keys,
    values_of_other_kinds,
)
from verl_padding.cli.job_config import compose_or_refuse
from verl_padding.errors import PaddingError, plural
from verl_padding.job.composition import JobArguments
from verl_padding.plan import STRATEGIES, Job

if TYPE_CHECKING:  # a broken plug-in may fail on import, which the doctor has to survive
    from verl_padding.job.verl_job import VerlJob

PLACES = ("path", "hf_config_path", "tokenizer_path")
"""Settings of a model that name folders which verl's class of it opens."""
SERVER_SIZES = ("tensor_model_parallel_size", "data_parallel_size", "pipeline_model_parallel_size")


def check_job_of(arguments: JobArguments) -> Iterator[Finding]:
    """Composes a job as verl would, and finds what the plug-in would refuse, and what would end the
    job later on."""
    from verl_padding.driver.job_check import check_job

    config = compose_or_refuse(arguments)
    engine = [each for each in arguments.overrides if each.startswith("model_engine=")]
    verls = compose_or_refuse(JobArguments(overrides=tuple(engine)))
    yield from run_check("settings", startup(config, verls))
    if any(values_of_other_kinds(config, verls)):
        return
    verl_job = None if config.get("padding") is None else check_job(config)
    yield from verls_own_check(config)
    if verl_job is None:
        why = "not asked for: the job trains without padding"
        yield hint("padding", f"{why}. Add +padding=fast.")
        return
    yield from _summary(verl_job)
    yield from _budgets(config, verl_job.planner_job())
    yield from _ranks_of_a_row(verl_job)


def startup(config: DictConfig, verls: DictConfig) -> Iterator[Finding]:
    """What would end verl's job in its first minutes, or change nothing in silence; ``verls`` is
    the config without overrides."""
    from verl_padding.job.role_engine import ACTOR_MODEL, CRITIC_MODEL, has_critic

    yield from unread_keys(config, verls)
    yield from ignored_settings(config, verls)
    yield from legacy_rewards(config)
    yield from (mistyped := list(values_of_other_kinds(config, verls)))
    yield from run_check("files", files_and_modules(config, verls))
    if mistyped:
        return  # what follows computes with them
    models = [ACTOR_MODEL, CRITIC_MODEL][: 1 + has_critic(config)]
    for model in models:
        yield from import_external_lib(config, model)
    yield from unknown_choices(config)
    yield from _sizes(config)
    tokenizers = []
    for model in models:
        tokenizers.append((yield from _model(config, model)))
    yield from data_findings(config, tokenizers[0])


def verls_own_check(config: DictConfig) -> Iterator[Finding]:
    """What verl's command checks before it starts Ray."""
    from verl.trainer.ppo.utils import need_critic, need_reference_policy
    from verl.utils.config import omega_conf_to_dataclass, validate_config

    # A critic's constructor would fetch and open its model, which the check does not look at.
    checked = config.copy()
    OmegaConf.update(checked, "critic.model", None, force_add=True)
    try:
        validate_config(checked, need_reference_policy(config), need_critic(config))
        omega_conf_to_dataclass(config.actor_rollout_ref.rollout)  # by the workers' constructors
    except PaddingError:
        raise
    except Exception as error:
        why = " ".join(str(error).split()).rstrip(".")
        yield wrong("verl", f"its check of the config: {why}. Correct the settings.")


def _sizes(config: DictConfig) -> Iterator[Finding]:
    """Whether GPUs divide into rollout servers, as verl's worker asserts."""
    rollout = config.actor_rollout_ref.rollout
    nodes = rollout if rollout.nnodes else config.trainer
    n_gpus = nodes.nnodes * nodes.n_gpus_per_node
    ranks = prod(rollout.get(size, 1) for size in SERVER_SIZES)
    if n_gpus < 1 or ranks < 1 or n_gpus % ranks:
        sizes, first = " x ".join(SERVER_SIZES), SERVER_SIZES[0]
        why = f"{ranks} GPUs of a rollout server ({sizes}) do not divide the job's {n_gpus}"
        yield wrong(f"actor_rollout_ref.rollout.{first}", f"{rollout[first]}: {why}. Change one.")


def _model(config: DictConfig, name: str) -> Generator[Finding, None, Any]:
    """Reads a model's folder as verl does; returns its tokenizer, None if there is none."""
    from verl.utils.config import omega_conf_to_dataclass

    from verl_padding.job.model_config import folder_here

    section = OmegaConf.select(config, name)
    folders = {place: folder_here(section.get(place) or section.path) for place in PLACES}
    if not all(folders.values()):
        return None  # of the hub; or missing, which has been found
    # verl would copy the folder into shared memory, and import modules that have been.
    others = {"use_shm": False, EXTERNAL_LIB: None}
    here = OmegaConf.merge(section, {place: str(folders[place]) for place in PLACES}, others)
    try:
        return omega_conf_to_dataclass(here).tokenizer
    except Exception as error:  # of transformers, or code that comes with the model
        why = " ".join(str(error.__cause__ or error).split())
        yield wrong(f"{name}.path", f"{section.path}: {why}. Correct the folder.")
        return None


def _ranks_of_a_row(verl_job: "VerlJob") -> Iterator[Finding]:
    """Whether ranks divide into those that share a row."""
    for engine in verl_job.engines.values():
        if engine.n_gpus % engine.gpus_per_row:
            why = f"{engine.n_gpus} GPUs, and {engine.gpus_per_row} of them share a row"
            yield wrong(engine.section, f"{why}. Set its parallel sizes to divisors.")


def _summary(verl_job: "VerlJob") -> Iterator[Finding]:
    """What the plug-in will do to the batches of a job that can run."""
    job = verl_job.planner_job()
    prompts = plural(job.prompts, "prompt")
    sessions = plural(job.sessions_per_prompt, "session")
    yield ok("strategy", f"{job.strategy}, {prompts} x {sessions} per batch")
    for name, update in job.updates.items():
        steps = STRATEGIES[job.strategy].describe_steps(job, update)
        yield ok(name, f"{steps}, {plural(update.dp_size, 'data-parallel rank')}")
    for line in verl_job.savings.lines():
        saving, _, state = line.partition(": ")
        yield hint(saving, state) if state.startswith("off") else ok(saving, state)


def _budgets(config: DictConfig, job: Job) -> Iterator[Finding]:
    """Whether the longest row that the settings allow fits into the token budget of each call."""
    longest = config.data.max_prompt_length + config.data.max_response_length
    # Where that is null, the model decides.
    longest = min(longest, config.actor_rollout_ref.rollout.get("max_model_len") or longest)
    for _, call in job.calls():
        if call.token_budget is not None and call.token_budget < longest:
            why = f"data.max_prompt_length and data.max_response_length allow a row of {longest}"
            message = f"{call.token_budget} tokens: {why}, which would end the job. Raise it."
            yield warning(call.budget_setting, message)
