"""Whether rows fit into the token budgets of the calls that compute them: a row that does not ends the job."""

from __future__ import annotations

from collections.abc import Iterator

from omegaconf import DictConfig, OmegaConf

from verl_padding.doctor.finding import Finding, ok, warning, wrong
from verl_padding.plan import Job

MODEL_LENGTH = "actor_rollout_ref.rollout.max_model_len"
"""Tokens of a prompt and its answer that the rollout allows; the model decides if it is null."""


def longest_row(config: DictConfig) -> tuple[int, str]:
    """Tokens that a row has at most, by the settings, and these in words."""
    longest = config.data.max_prompt_length + config.data.max_response_length
    allowed = OmegaConf.select(config, MODEL_LENGTH)
    if isinstance(allowed, int) and allowed < longest:
        return allowed, f"{MODEL_LENGTH} = {allowed}"
    return longest, f"data.max_prompt_length + data.max_response_length = {longest}"


def longest_rows(config: DictConfig, job: Job) -> Iterator[Finding]:
    """Whether the longest row fits into the token budget of each call."""
    budgets = _by_setting(job)
    longest, told = longest_row(config)
    for setting, budget in budgets.items():
        if budget < longest:
            value, enough = _of_a_rank(config, setting, budget, longest)
            yield warning(
                setting,
                f"{value}: below {told}. A row that is longer than the budget ends the job. Raise it to {enough}.",
            )
    if budgets and min(budgets.values()) >= longest:
        yield ok("lengths", f"{told}, and every token budget is as large")


def shortest_rows(config: DictConfig, prompts: str, shortest: int) -> Iterator[Finding]:
    """Whether a token budget is below every row of some prompts, which have a token of a response besides.

    Args:
        prompts: which these are.
        shortest: tokens of the shortest one.
    """
    longest, _ = longest_row(config)
    for setting, budget in _budgets_of_job(config).items():
        if budget <= shortest:
            value, enough = _of_a_rank(config, setting, budget, longest)
            yield wrong(
                setting,
                f"{value}: {prompts} have {shortest} tokens or more, without a response. A row that does not fit ends "
                f"the job. Raise it to {enough}.",
            )


def _of_a_rank(config: DictConfig, setting: str, budget: int, longest: int) -> tuple[str, int]:
    """What a setting says of its budget, in words, and what would hold the longest row: ranks that share a row have
    so many tokens each."""
    value = OmegaConf.select(config, setting.lstrip("+"))
    if value is None:  # verl's class of the section has one
        from verl_padding.config import PaddingConfig
        from verl_padding.job.job_reader import JobReader

        engines = JobReader(config, PaddingConfig.from_section(config.get("padding"))).engines.values()
        sharing = (engine.sequence_parallel_size for engine in engines if setting in engine.settings.values())
        value = budget // next(sharing, 1)
    ranks = budget // int(value)
    shared = f" on each of {ranks} ranks that share a row" if ranks > 1 else ""
    return f"{value}{shared}", -(-longest // ranks)


def _budgets_of_job(config: DictConfig) -> dict[str, int]:
    """Those of a job that the plug-in plans; a refusal of it is told with the plan."""
    from verl_padding.config import PaddingConfig
    from verl_padding.driver.trainers import asks_for_padding, padded_trainer
    from verl_padding.errors import PaddingError
    from verl_padding.job.job_reader import JobReader
    from verl_padding.plan.errors import PlanError

    try:
        if not asks_for_padding(config):
            return {}
        padding = PaddingConfig.from_section(config.get("padding"))
        reader = JobReader(config, padding, padded_trainer(config.trainer.v1.trainer_mode).extends)
        job = reader.step_job(dp_sizes=reader.configured_dp_sizes(), updates_actor=True, seed=padding.seed)
    except (PaddingError, PlanError):
        return {}
    return _by_setting(job)


def _by_setting(job: Job) -> dict[str, int]:
    """Setting -> tokens that a micro-batch has at most, of the calls that are cut by tokens."""
    return {call.budget_setting: call.token_budget for _, call in job.calls() if call.token_budget is not None}
