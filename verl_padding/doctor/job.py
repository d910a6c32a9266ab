"""All that is checked in a job, the cheap things first."""

from collections.abc import Iterator
from math import lcm

from omegaconf import DictConfig, OmegaConf

from verl_padding.doctor.finding import Check, Finding, ok, warning, wrong
from verl_padding.errors import PaddingError
from verl_padding.job.composition import JobArguments, compose_job
from verl_padding.job.role_engine import PARALLEL_SIZES, RoleEngine, has_critic
from verl_padding.plan import STRATEGIES, Job, PlanError
from verl_padding.plan.planner import reuses_layout_of
from verl_padding.plan.plural import plural

PADDING_OFF = ok(
    "padding", "not asked for: verl trains as if the plug-in were not there. Add +padding=prompt."
)
IGNORED_SETTINGS = {
    "actor_rollout_ref.actor.use_prefix_grouper": "padding.sharing",
    "data.truncation": "data.filter_overlong_prompts",
    "critic.ppo_micro_batch_size_per_gpu": "+critic.{engine}.micro_batch_size_per_gpu",
    "critic.forward_micro_batch_size_per_gpu": "+critic.{engine}.infer_micro_batch_size_per_gpu",
    "critic.ppo_max_token_len_per_gpu": "+critic.ppo_infer_max_token_len_per_gpu",
    "critic.forward_max_token_len_per_gpu": "+critic.ppo_infer_max_token_len_per_gpu",
    "critic.ulysses_sequence_parallel_size": "critic.fsdp.ulysses_sequence_parallel_size",
}
"""Setting that verl's v1 trainers and workers pass over -> the one that does what it says. Reported
where a job sets it to another value than verl's own config does."""


def checks_of_job(arguments: JobArguments) -> Iterator[Check]:
    """Composes the job as verl would, and finds settings that verl would pass over in silence, and
    what the plug-in would refuse."""
    try:
        config = compose_job(arguments)
    except (Exception, SystemExit) as error:  # a broken plug-in ends a process that asks for it
        yield Check(
            "settings",
            (wrong("overrides", f"{type(error).__name__}: {' '.join(str(error).split())}"),),
        )
        return
    yield Check.run("settings", _ignored_settings(config))
    yield Check.run("plan", _plan(config))


def _ignored_settings(config: DictConfig) -> Iterator[Finding]:
    stock = compose_job(JobArguments())
    engine = config.critic.strategy.replace("fsdp2", "fsdp")
    for key, instead in IGNORED_SETTINGS.items():
        section, _, name = key.rpartition(".")
        if section == "critic" and not has_critic(config):
            continue
        value = OmegaConf.select(config, key)
        is_taken_over = OmegaConf.is_interpolation(OmegaConf.select(config, section), name)
        if value is not None and not is_taken_over and value != OmegaConf.select(stock, key):
            yield warning(
                key, f"{value}: has no effect. Set {instead.format(engine=engine)} instead."
            )


def _plan(config: DictConfig) -> Iterator[Finding]:
    from verl_padding.driver.job_check import check_job
    from verl_padding.driver.trainers import asks_for_padding

    try:
        if not asks_for_padding(config):
            yield PADDING_OFF
            return
        reader = check_job(config)
        job = reader.step_job()
        yield ok("trainer", config.trainer.v1.trainer_mode)
        yield from summary(job, reader.engines, reader.padding.denominator)
        for line in reader.savings.lines():
            subject, _, state = line.partition(": ")
            yield ok(subject, state)
        yield from _budgets(config, job)
    except (PaddingError, PlanError) as refusal:
        yield wrong("padding", str(refusal))


def summary(job: Job, engines: dict[str, RoleEngine], denominator: str) -> Iterator[Finding]:
    """What the plug-in will do to the batches of a job that can run."""
    size = (
        f"{plural(job.prompts, 'prompt')} x {plural(job.sessions_per_prompt, 'session')} per batch"
    )
    yield ok("strategy", f"{job.strategy}, {size}")
    for role, engine in engines.items():
        sizes = {word: engine.size(word) for word in PARALLEL_SIZES[engine.strategy]}
        shape = " x ".join(f"{word} {size}" for word, size in sizes.items() if size > 1)
        cut = f": {shape}, so {plural(engine.dp_size, 'data-parallel rank')}" if shape else ""
        yield ok(
            f"engine of the {role}", f"{engine.strategy}, {plural(engine.n_gpus, 'rank')}{cut}"
        )
    for name, update in job.updates.items():
        steps, ranks = (
            STRATEGIES[job.strategy].describe_steps(job, update),
            plural(update.dp_size, "data-parallel rank"),
        )
        budget = (
            f"{update.token_budget} tokens"
            if update.token_budget
            else plural(update.micro_batch_rows, "row")
        )
        yield ok(name, f"{steps}, {ranks}, micro-batches of at most {budget}")
    for name, inference in job.inference.items():
        taken = reuses_layout_of(job, inference)
        cut = "" if taken is None else f", micro-batches of the update of the {taken}"
        yield ok(name, plural(inference.dp_size, "data-parallel rank") + cut)
    multiple = lcm(*(engine.row_multiple for engine in engines.values()))
    why = f", since engines round rows up to multiples of {multiple}" if multiple > 1 else ""
    yield ok(
        "pads",
        f"{job.pad_tokens} tokens each{why}; the denominator of seq-mean losses is {denominator}",
    )


def _budgets(config: DictConfig, job: Job) -> Iterator[Finding]:
    """Whether the longest row that the settings allow fits into the token budget of each call."""
    longest = config.data.max_prompt_length + config.data.max_response_length
    allowed = config.actor_rollout_ref.rollout.get(
        "max_model_len"
    )  # the model decides if it is null
    source = "data.max_prompt_length + data.max_response_length"
    if isinstance(allowed, int) and allowed < longest:
        longest, source = allowed, "actor_rollout_ref.rollout.max_model_len"
    budgets = {
        call.budget_setting: call.token_budget
        for _, call in job.calls()
        if call.token_budget is not None
    }
    for setting, budget in budgets.items():
        if budget < longest:
            ranks = max(budget // int(OmegaConf.select(config, setting.lstrip("+")) or budget), 1)
            message = (
                f"a budget of {budget} tokens is below {source} = {longest}, and a longer row would"
                " end the job"
            )
            yield warning(
                setting, f"{budget // ranks}: {message}. Raise it to {-(-longest // ranks)}."
            )
