"""The sessions stage: sessions of the job in this process, by verl's own classes, and what their
rows lack.

The user's own data set, chat template, agent loop, tools and rewards run on a few prompts, without
Ray or a model.
"""

import asyncio
import faulthandler
import pickle
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from textwrap import shorten
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
from verl_padding.on_cpu.dry_run.failure import DryRunError, traceback_of
from verl_padding.on_cpu.dry_run.reduced_job import PROMPTS, SESSIONS, turn_off_servers, validates
from verl_padding.on_cpu.scripted_replies import Replies
from verl_padding.plan.row_keys import session_of_key

TRAIN, VAL = "train", "val"
AS_LONG_AS_RESPONSES = ("response_mask", "rollout_log_probs", "rm_scores")
MAX_TEXT = 400  # characters of a text that are shown
GRACE_S = 5  # seconds after the time limit in which sessions end at the line where they wait


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
    failures: Counter[str] = field(default_factory=Counter)
    """Traceback -> how often it was raised; verl goes on without such a session."""
    replies: int = 0
    tokenizer: Any = None
    turned_off: list[str] = field(default_factory=list)
    """What of the job was not simulated."""

    def rows_in(self, partition: str) -> list[SampledRow]:
        return [row for row in self.rows if row.partition == partition]


def simulate_sessions(
    config: DictConfig, *, replies: Sequence[str] = (), timeout_s: float = 300
) -> Sessions:
    """Simulates sessions of the first prompts, and of validation if the job validates.

    Code that holds the interpreter past the time limit ends this process, once Python has shown
    where.

    Args:
        config: of the job; it is changed.
        replies: texts of the model, among others.

    Raises:
        DryRunError: no session can begin, or one does not end.
    """
    simulated = Sessions()
    with open_dict(config):
        config.actor_rollout_ref.rollout.n = min(SESSIONS, config.actor_rollout_ref.rollout.n)
        config.actor_rollout_ref.rollout.val_kwargs.n = 1
        config.data.filter_overlong_prompts_workers = 1
        simulated.turned_off = turn_off_servers(config)
    faulthandler.dump_traceback_later(timeout_s + GRACE_S, exit=True, file=2)
    try:
        asyncio.run(asyncio.wait_for(_simulate(config, simulated, replies), timeout_s))
    except TimeoutError as error:
        message = f"sessions: still running after {timeout_s:.0f} s"
        raise DryRunError(message, [*simulated.failures]) from error
    except DryRunError:
        raise
    except Exception as error:
        raise DryRunError("sessions: none can begin", [traceback_of(error)]) from error
    finally:
        faulthandler.cancel_dump_traceback_later()
    return simulated


async def _simulate(config: DictConfig, simulated: Sessions, texts: Sequence[str]) -> None:
    class Worker(PaddedAgentLoopWorker):
        async def _run_agent_loop(self, *args: Any, **kwargs: Any) -> Any:
            try:
                return await super()._run_agent_loop(*args, **kwargs)
            except (Exception, asyncio.CancelledError) as error:
                simulated.failures[traceback_of(error)] += 1
                raise

    model = omega_conf_to_dataclass(config.actor_rollout_ref.model)
    simulated.tokenizer = model.tokenizer
    compute_score = RewardLoopWorker(by_value(config)).compute_score
    replies = Replies(model.tokenizer, config.actor_rollout_ref.rollout, texts)
    with mock.patch.object(agent_loop_tq, "tq", _Queue(simulated.rows)):
        server = _ScriptedServer(model, replies)
        worker = Worker(by_value(config), server, None, [_remote(compute_score)])
        for setting, is_train in (("data.train_files", True), ("data.val_files", False)):
            if is_train or validates(config):
                batch = _batch(config, model, setting, is_train=is_train)
                await worker.generate_sequences(batch)
                await asyncio.gather(*worker.background_tasks)
    simulated.replies = replies.given


def _batch(config: DictConfig, model: Any, setting: str, *, is_train: bool) -> Any:
    """Prompts as verl's trainer hands them to its agent loop workers."""
    files, n_read = OmegaConf.select(config, setting), 8 * PROMPTS
    of_model = (model.tokenizer, model.processor)
    data = create_rl_dataset(files, config.data, *of_model, is_train=is_train, max_samples=n_read)
    if not len(data):
        raise DryRunError(
            f"{setting}: no prompt is left of the first {n_read}. Look at its filter."
        )
    loader = DataLoader(data, batch_size=min(PROMPTS, len(data)), collate_fn=collate_fn)
    columns = next(iter(loader))
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
        steps = {"global_steps": 1, "min_global_steps": 1, "max_global_steps": 1}
        return self._replies.answer(request_id, len(prompt_ids), sampling_params, **steps)


def describe_sessions(simulated: Sessions) -> Iterator[str]:
    """Lines about rows, tokens and rewards of the sessions."""
    rows = simulated.rows_in(TRAIN)
    sessions = Counter(session_of_key(row.key) for row in rows)
    sizes = sorted(Counter(sessions.values()).items())
    per_session = ", ".join(f"{size} ({count} sessions)" for size, count in sizes)
    yield f"{len(rows)} rows of {len(sessions)} sessions ({simulated.replies} replies)"
    if not rows:
        return
    yield f"rows a session: {per_session}"
    for name in ("prompts", "responses"):
        lengths = [len(row.fields[name]) for row in rows]
        yield f"tokens of {name}: {min(lengths)} to {max(lengths)}"
        text = simulated.tokenizer.decode(rows[0].fields[name])
        yield f"first of the {name}: {shorten(text, MAX_TEXT, placeholder=' ..')}"
    trained = sum(int(row.fields["response_mask"].sum()) for row in rows)
    yield f"trained tokens: {trained}"
    rewards = Counter(
        round(float(row.fields["rm_scores"].sum()), 3) for row in rows if "rm_scores" in row.fields
    )
    counts = [f"{reward:g} ({count} rows)" for reward, count in sorted(rewards.items())]
    yield f"rewards: {', '.join(counts)}"
    if validated := simulated.rows_in(VAL):
        yield f"validation: {len(validated)} rows"


def find_problems(simulated: Sessions, config: DictConfig) -> list[str]:
    """What the rest of a job reads of rows and would not find, or would silently misread."""
    rows = simulated.rows_in(TRAIN)
    needed = ["rm_scores"]
    if config.actor_rollout_ref.rollout.calculate_log_probs:
        needed.append("rollout_log_probs")
    found: Counter[str] = Counter()
    for row in rows:
        missing = [name for name in needed if name not in row.fields]
        found.update(f"rows have no {name}, which verl's trainer reads" for name in missing)
        length = len(row.fields["responses"])
        for name in AS_LONG_AS_RESPONSES:
            value = row.fields.get(name)
            if isinstance(value, torch.Tensor) and len(value) != length:
                problem = f"rows have a {name} of {len(value)} tokens beside a response of {length}"
                found[problem] += 1
    return [f"{count} of {len(rows)} {message}" for message, count in found.items()]
