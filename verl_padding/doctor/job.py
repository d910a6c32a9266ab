"""All that is checked in a job, the cheap things first."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from omegaconf import DictConfig, OmegaConf

from verl_padding.doctor.finding import Finding, hint, ok, warning, wrong
from verl_padding.doctor.job_config import compose_or_refuse
from verl_padding.errors import PaddingError
from verl_padding.job.composition import JobArguments
from verl_padding.plan import STRATEGIES, Job, PlanError
from verl_padding.plan.plural import plural

if TYPE_CHECKING:  # a broken plug-in may fail on import, which the doctor has to survive
    from verl_padding.job.verl_job import VerlJob

PADDING_OFF = hint(
    "padding", "not asked for: verl trains as if the plug-in were not there. Add +padding=prompt."
)


def check_job_of(arguments: JobArguments) -> Iterator[Finding]:
    """Composes a job as verl would, and finds what the plug-in would refuse, and what would end the
    job later on."""
    from verl_padding.config import replace_old_settings
    from verl_padding.driver.job_check import check_job
    from verl_padding.driver.trainers import asks_for_padding

    try:
        config = compose_or_refuse(arguments)
        yield from _missing_files(config)
        if not asks_for_padding(config):
            yield PADDING_OFF
            return
        verl_job = check_job(config)
        for change in replace_old_settings(config.get("padding") or {})[1]:
            yield warning("padding", change)
        yield ok("trainer", config.trainer.v1.trainer_mode)
        yield from _summary(verl_job)
        yield from _budgets(config, verl_job.step_job())
    except (PaddingError, PlanError) as refusal:
        subject, _, message = str(refusal).partition(": ")
        yield wrong(subject, message)


def _missing_files(config: DictConfig) -> Iterator[Finding]:
    if OmegaConf.select(config, "data.custom_cls.path") is not None:
        return  # a data set of the user's own may read the setting in its own way
    for setting in ("data.train_files", "data.val_files"):
        files = OmegaConf.select(config, setting)
        for file in [files] if isinstance(files, str) else files or []:
            if "://" not in file and not Path(file).expanduser().exists():
                yield warning(setting, f"{file}: there is no such file here. verl opens it.")


def _summary(verl_job: "VerlJob") -> Iterator[Finding]:
    """What the plug-in will do to the batches of a job that can run."""
    job = verl_job.step_job()
    prompts = plural(job.prompts, "prompt")
    sessions = plural(job.sessions_per_prompt, "session")
    yield ok("strategy", f"{job.strategy}, {prompts} x {sessions} per batch")
    for name, update in job.updates.items():
        steps = STRATEGIES[job.strategy].describe_steps(job, update)
        ranks = plural(update.dp_size, "data-parallel rank")
        budget = plural(update.micro_batch_rows, "row")
        if update.token_budget:
            budget = f"{update.token_budget} tokens"
        yield ok(name, f"{steps}, {ranks}, micro-batches of at most {budget}")
    denominator = f"the denominator of seq-mean losses is {verl_job.padding.denominator}"
    yield ok("pads", f"{job.pad_tokens} tokens each; {denominator}")
    for line in verl_job.savings.lines():
        saving, _, state = line.partition(": ")
        yield hint(saving, state) if state.startswith("off") else ok(saving, state)


def _budgets(config: DictConfig, job: Job) -> Iterator[Finding]:
    """Whether the longest row that the settings allow fits into the token budget of each call."""
    source = "data.max_prompt_length + data.max_response_length"
    longest = config.data.max_prompt_length + config.data.max_response_length
    allowed = config.actor_rollout_ref.rollout.get("max_model_len")
    if isinstance(allowed, int) and allowed < longest:  # where it is null, the model decides
        longest, source = allowed, "actor_rollout_ref.rollout.max_model_len"
    budgets = {call.budget_setting: call.token_budget for _, call in job.calls()}
    for setting, budget in budgets.items():
        if budget is None or budget >= longest:
            continue
        # The setting is a GPU's; ranks of one sequence-parallel group share their budgets.
        of_gpu = int(OmegaConf.select(config, setting.lstrip("+")) or budget)
        gpus = max(budget // of_gpu, 1)
        why = f"a budget of {budget} tokens is below {source} = {longest}"
        fix = f"Raise it to {-(-longest // gpus)}"
        yield warning(setting, f"{of_gpu}: {why}, and a longer row would end the job. {fix}.")
