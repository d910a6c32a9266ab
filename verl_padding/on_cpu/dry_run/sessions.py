"""The sessions stage: sessions of the job in this process, by verl's own classes, and what their
rows lack.

The user's own data set, chat template, agent loop, tools and rewards run on a few prompts, without
Ray or a model.
"""

import asyncio
import logging
import pickle
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any
from unittest import mock
from uuid import uuid4

import numpy as np
import torch
from omegaconf import DictConfig, OmegaConf, open_dict
from ray import cloudpickle
from torch.utils.data import DataLoader
from verl.experimental.reward_loop.reward_loop import RewardLoopWorker
from verl.trainer.ppo.utils import create_rl_dataset
from verl.trainer.ppo.v1 import agent_loop_tq
from verl.utils import tensordict_utils as tu
from verl.utils.config import omega_conf_to_dataclass
from verl.utils.dataset.rl_dataset import collate_fn

from verl_padding.driver.agent_loops import PaddedAgentLoopWorker
from verl_padding.on_cpu.dry_run.failure import (
    SESSION_FAILED,
    DryRunError,
    Failure,
    count_failure,
    shortened,
)
from verl_padding.on_cpu.dry_run.reduced_job import (
    PROMPTS,
    SESSIONS,
    TOOLS,
    validates,
    without_servers,
)
from verl_padding.on_cpu.scripted_replies import Replies
from verl_padding.plan.row_keys import session_of_key

TRAIN, VAL = "train", "val"
AS_LONG_AS_RESPONSES = ("response_mask", "rollout_log_probs", "rm_scores")


@dataclass(frozen=True)
class SampledRow:
    """A row as TransferQueue would get it."""

    key: str
    fields: dict[str, Any]
    partition: str


@dataclass
class Sessions:
    """What came of them."""

    rows: list[SampledRow] = field(default_factory=list)
    failures: dict[tuple[object, ...], Failure] = field(default_factory=dict)
    """One for each kind, with how often it was raised; verl goes on without such a session."""
    logged: Counter[str] = field(default_factory=Counter)
    """Warnings and errors that verl, or code of the user's own, has logged and gone on."""
    replies: int = 0
    tokenizer: Any = None
    left_out: list[str] = field(default_factory=list)
    """What of the job was not simulated."""

    def of(self, partition: str) -> list[SampledRow]:
        return [row for row in self.rows if row.partition == partition]


def simulate_sessions(
    config: DictConfig,
    *,
    replies: Sequence[str] = (),
    with_tools: bool = True,
    with_rewards: bool = True,
) -> Sessions:
    """Simulates sessions of the first prompts, and of validation if the job validates.

    Args:
        config: of the job; it is changed.
        replies: texts of the model, among others.

    Raises:
        DryRunError: no session can begin.
    """
    simulated = Sessions()
    with open_dict(config):
        config.actor_rollout_ref.rollout.n = min(SESSIONS, config.actor_rollout_ref.rollout.n)
        config.actor_rollout_ref.rollout.val_kwargs.n = 1
        config.data.filter_overlong_prompts_workers = 1
        simulated.left_out = without_servers(config)
        for setting in TOOLS if not with_tools else ():
            OmegaConf.update(config, setting, None)
    handler, verls = _Count(simulated.logged), logging.getLogger("verl")
    level = verls.level
    logging.getLogger().addHandler(handler)
    verls.setLevel(logging.WARNING)
    try:
        asyncio.run(_simulate(config, simulated, replies, with_rewards=with_rewards))
    except DryRunError:
        raise
    except Exception as error:
        failure = Failure.of(error)
        raise DryRunError(
            f"{failure.kind}: {failure.message}", stage="sessions", failures=[failure]
        ) from error
    finally:
        logging.getLogger().removeHandler(handler)
        verls.setLevel(level)
    return simulated


async def _simulate(
    config: DictConfig, simulated: Sessions, texts: Sequence[str], *, with_rewards: bool
) -> None:
    class Worker(PaddedAgentLoopWorker):
        async def _run_agent_loop(self, *args: Any, **kwargs: Any) -> Any:
            try:
                return await super()._run_agent_loop(*args, **kwargs)
            except Exception as error:
                count_failure(Failure.of(error), simulated.failures)
                raise

    model = omega_conf_to_dataclass(config.actor_rollout_ref.model)
    simulated.tokenizer = model.tokenizer
    compute_score = RewardLoopWorker(by_value(config)).compute_score if with_rewards else _no_reward
    replies = Replies(model.tokenizer, config.actor_rollout_ref.rollout, texts)
    with mock.patch.object(agent_loop_tq, "tq", _Queue(simulated.rows)):
        worker = Worker(
            by_value(config), _ScriptedServer(model, replies), None, [_remote(compute_score)]
        )
        for setting, is_train in (("data.train_files", True), ("data.val_files", False)):
            if (batch := _batch(config, model, setting, is_train=is_train)) is not None:
                await worker.generate_sequences(batch)
                await asyncio.gather(*worker.background_tasks)
    simulated.replies = replies.given
    if not simulated.of(TRAIN) and simulated.of(VAL):
        raise DryRunError(
            "data.train_files: verl takes a prompt with a column `validate` for one of a "
            "validation, and would wait for ever for one to train on. Leave that column out.",
            stage="sessions",
        )


def _batch(config: DictConfig, model: Any, setting: str, *, is_train: bool) -> Any:
    """Prompts as verl's trainer hands them to its agent loop workers; None for a validation that
    the job has not."""
    of_model = (model.tokenizer, model.processor)
    files = OmegaConf.select(config, setting)
    data = create_rl_dataset(
        files, config.data, *of_model, is_train=is_train, max_samples=8 * PROMPTS
    )
    if not len(data):
        message = f"{setting}: no prompt is left of the first {8 * PROMPTS}. Look at its filter."
        raise DryRunError(message, stage="data")
    if not is_train and not validates(config):
        return None
    columns = next(
        iter(DataLoader(data, batch_size=min(PROMPTS, len(data)), collate_fn=collate_fn))
    )
    columns["uid"] = np.array([str(uuid4()) for _ in columns["raw_prompt"]], dtype=object)
    batch = tu.get_tensordict(columns)
    tu.assign_non_tensor(batch, global_steps=1, **({} if is_train else {"validate": True}))
    return by_value(batch)


def _remote(compute_score: Callable[[Any], Awaitable[Any]]) -> Any:
    """A function of rewards that is called as Ray's workers are."""

    async def remote(data: Any) -> Any:
        return by_value(await compute_score(by_value(data)))

    return SimpleNamespace(compute_score=SimpleNamespace(remote=remote))


def by_value(value: Any) -> Any:
    """A copy, as Ray hands it to another process: in a job, rewards, loops and the queue each have
    their own.

    What cannot be pickled is an error here too, lazily opened images are read once, and arrays are
    read-only.
    """
    buffers: list[pickle.PickleBuffer] = []
    pickled = cloudpickle.dumps(value, protocol=5, buffer_callback=buffers.append)
    return cloudpickle.loads(pickled, buffers=[bytes(buffer) for buffer in buffers])


class _Queue:
    """In the place of TransferQueue: keeps what the worker puts."""

    def __init__(self, rows: list[SampledRow]):
        self._rows = rows

    def init(self, *_: Any, **__: Any) -> None: ...

    async def async_kv_put(self, **_: Any) -> None: ...

    async def async_kv_batch_put(
        self, keys: Any, fields: Any, tags: Any, partition_id: str
    ) -> None:
        for place, key in enumerate(keys):
            row = {name: tu.unwrap_non_tensor_data(fields[name][place]) for name in fields.keys()}  # noqa: SIM118
            self._rows.append(SampledRow(key, by_value(row), partition_id))


class _ScriptedServer:
    """In the place of verl's client of rollout servers."""

    def __init__(self, model: Any, replies: Replies):
        self.tokenizer = model.tokenizer
        self._vocabulary = model.hf_config.get_text_config().vocab_size
        self._replies = replies

    async def generate(
        self,
        request_id: str,
        *,
        prompt_ids: list[int],
        sampling_params: dict[str, Any],
        **others: Any,
    ) -> Any:
        sampling_params, _ = by_value((sampling_params, others))
        if not isinstance(prompt_ids, list) or not all(
            isinstance(token, int) for token in prompt_ids
        ):
            raise TypeError(
                f"prompt_ids: a list of token ids is needed, not {type(prompt_ids).__name__}"
            )
        if prompt_ids and max(prompt_ids) >= self._vocabulary:
            raise ValueError(
                f"prompt_ids: token {max(prompt_ids)}, but the model's vocab_size is "
                f"{self._vocabulary}"
            )
        steps = {"global_steps": 1, "min_global_steps": 1, "max_global_steps": 1}
        return self._replies.answer(request_id, len(prompt_ids), sampling_params, **steps)


async def _no_reward(_: Any) -> dict[str, Any]:
    return {"reward_score": 0.0, "reward_extra_info": {}}


class _Count(logging.Handler):
    """Counts what is logged; failures of sessions are shown by themselves."""

    def __init__(self, logged: Counter[str]):
        super().__init__(logging.WARNING)
        self._logged = logged

    def emit(self, record: logging.LogRecord) -> None:
        message = " ".join(record.getMessage().split())
        if not message.startswith(SESSION_FAILED):
            self._logged[f"{record.name}: {message[:200]}"] += 1


def description(simulated: Sessions) -> Iterator[str]:
    """Lines about rows, tokens and rewards of the sessions."""
    rows = simulated.of(TRAIN)
    sessions = Counter(session_of_key(row.key) for row in rows)
    sizes = sorted(Counter(sessions.values()).items())
    per_session = ", ".join(f"{size} ({count} sessions)" for size, count in sizes)
    yield (
        f"{len(rows)} rows of {len(sessions)} sessions ({simulated.replies} replies); rows a"
        f" session: {per_session}"
    )
    if not rows:
        return
    prompts, responses = (
        sorted(len(row.fields[name]) for row in rows) for name in ("prompts", "responses")
    )
    trained = sum(int(row.fields["response_mask"].sum()) for row in rows)
    yield (
        f"tokens: prompts {prompts[0]} to {prompts[-1]}, responses {responses[0]} to "
        f"{responses[-1]}, {trained} of {sum(responses)} response tokens are trained"
    )
    rewards = Counter(
        round(float(row.fields["rm_scores"].sum()), 3) for row in rows if "rm_scores" in row.fields
    )
    yield "rewards: " + ", ".join(
        f"{reward:g} ({count} rows)" for reward, count in sorted(rewards.items())
    )
    if validated := simulated.of(VAL):
        yield f"validation: {len(validated)} rows"
    for name in ("prompts", "responses"):
        yield f"first {name[:-1]}: {shortened(simulated.tokenizer.decode(rows[0].fields[name]))}"


def problems(simulated: Sessions, config: DictConfig) -> Iterator[str]:
    """What the rest of a job reads of rows and would not find, or would silently misread."""
    rows = simulated.of(TRAIN)
    found: Counter[str] = Counter()
    needed = ["rm_scores"]
    needed += ["rollout_log_probs"] if config.actor_rollout_ref.rollout.calculate_log_probs else []
    for row in rows:
        found.update(
            f"rows have no {name}, which verl's trainer reads"
            for name in needed
            if name not in row.fields
        )
        length = len(row.fields["responses"])
        for name in AS_LONG_AS_RESPONSES:
            value = row.fields.get(name)
            if isinstance(value, torch.Tensor) and len(value) != length:
                found[
                    f"rows have a {name} of {len(value)} tokens beside a response of {length}"
                ] += 1
    for message, count in found.items():
        yield f"{count} of {len(rows)} {message}"
    if _template_drops_messages(rows, simulated.tokenizer):
        yield (
            "the chat template renders different messages to the same prompt: their content does"
            " not reach the model"
        )


def _template_drops_messages(rows: Sequence[SampledRow], tokenizer: Any) -> bool:
    """As a template does of prompts that are text, and no lists of messages; verl passes that
    over."""
    first = [row.fields for row in rows if row.key.endswith("_0")]
    messages = {str(fields.get("raw_prompt")): fields.get("raw_prompt") for fields in first}
    prompts = {tuple(fields["prompts"].tolist()) for fields in first}
    if len(prompts) > 1 or len(messages) < 2 or not tokenizer.chat_template:
        return False
    options = {"tokenize": False, "add_generation_prompt": True}
    return len({tokenizer.apply_chat_template(each, **options) for each in messages.values()}) == 1
