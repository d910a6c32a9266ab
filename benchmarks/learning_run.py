"""One run of the task of recipes/context_reset in one process: what an agent earns, batch after
batch, with the mini-batches of a job.

Model, data, agent and the random numbers of its replies are those of a whole job of the same seed,
plans the job's, estimators, losses and optimizers verl's; ranks, pads and micro-batches, which
change no gradient, are left out. A context shows one of two symbols, and a reply has one token: a
model's outputs for two contexts are those for all rows. In a mean over tokens, those of a
mini-batch are as good in one row as in many. So a run takes seconds.
"""

from __future__ import annotations

import copy
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import chain
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import torch
import transformers
from omegaconf import DictConfig
from tensordict import TensorDict
from verl import DataProto
from verl.trainer.ppo.v1.utils import compute_advantage_for_multi_trajectories
from verl.utils import tensordict_utils as tu
from verl.utils.config import omega_conf_to_dataclass
from verl.utils.torch_functional import (
    get_constant_schedule_with_warmup,
    get_cosine_schedule_with_warmup,
)
from verl.workers.config.optimizer import build_optimizer
from verl.workers.utils.losses import ppo_loss, value_loss

from benchmarks.stock_layout import deal_as_verl
from verl_padding.driver.job_check import check_job
from verl_padding.job.calls import ACTOR, CRITIC
from verl_padding.job.composition import JobArguments, compose_job
from verl_padding.plan import Job, Rows, plan_batch
from verl_padding.plan.row_keys import row_key, uid_of_key
from verl_padding.recipes.context_reset.tasks import SYMBOLS, SymbolPath

Columns = dict[str, torch.Tensor]
"""Name -> a value of each row of a batch, (rows,)."""
RowsOfSteps = Sequence[Sequence[int]]
"""Numbers of the rows of each mini-batch."""


@cache
def job_of(overrides: tuple[str, ...]) -> tuple[DictConfig, Job | None, dict[str, Any]]:
    """A job's config, what its batches are planned by (None of stock verl), and verl's losses of
    actor and critic."""
    config = compose_job(JobArguments(overrides=("+local=cpu", *overrides)))
    actor = config.actor_rollout_ref.actor
    losses = {ACTOR: partial(ppo_loss, config=omega_conf_to_dataclass(actor))}
    if config.algorithm.adv_estimator == "gae":
        losses[CRITIC] = partial(value_loss, config=omega_conf_to_dataclass(config.critic))
    return config, check_job(config).planner_job() if "padding" in config else None, losses


@dataclass(frozen=True, kw_only=True)
class Batch:
    """What an agent has played, session after session."""

    key_R: list[str]
    columns: Columns
    """Which symbol each row shows, the token that answers it, and the reward of its session."""
    reward_S: list[float]


class Learner:
    """A model, its loss, and the optimizer that a worker of verl makes for it, by its ``section``
    of the config."""

    def __init__(self, model: Any, loss: Any, section: DictConfig, rate: float, batches: int):
        assert section.loss_agg_mode == "token-mean"
        self.model, self._loss, self._clip = model.train(), loss, section.optim.clip_grad
        optim = copy.deepcopy(section.optim)
        optim.lr *= rate
        self._optimizer = build_optimizer(model.parameters(), omega_conf_to_dataclass(optim))
        self._schedule = get_constant_schedule_with_warmup(self._optimizer, 0)
        if optim.lr_scheduler_type == "cosine":
            self._schedule = get_cosine_schedule_with_warmup(
                self._optimizer, 0, batches, min_lr_ratio=optim.min_lr_ratio
            )

    def outputs(self, contexts: torch.Tensor, rows: Columns) -> Columns:
        """What the model says of the reply of each row."""
        symbol_R, last = rows["symbols"], self.model(contexts).logits[:, -1]
        if last.shape[-1] == 1:
            return {"values": last[symbol_R, 0]}
        log_probs = last.log_softmax(-1)
        entropy = -(log_probs.exp() * log_probs).sum(-1)
        return {
            "log_probs": log_probs[symbol_R, rows["responses"]],
            "entropy": entropy[symbol_R],
        }

    def update(self, contexts: torch.Tensor, rows_M: RowsOfSteps, columns: Columns) -> None:
        """Trains on a batch: an optimizer step for each mini-batch."""
        for numbers in rows_M:
            rows = {name: of[list(numbers)] for name, of in columns.items()}
            loss, _ = self._loss(
                # What a model says of a token stands at the one before: first, that of a prompt.
                model_output={
                    name: torch.nn.functional.pad(of, (0, 1))
                    for name, of in self.outputs(contexts, rows).items()
                },
                data=_in_one_row(rows),
            )
            loss.backward()
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self._clip)
            self._optimizer.step()
            self._optimizer.zero_grad()
        self._schedule.step()


def _in_one_row(rows: Columns) -> TensorDict:
    """A micro-batch that a loss of verl takes, with a prompt of one token and a response of those
    of all rows."""
    data = TensorDict({name: of[None] for name, of in rows.items()}, batch_size=1)
    data["response_mask"] = torch.ones_like(data["responses"])
    data["prompts"] = data["responses"][:, :1]
    data["attention_mask"] = torch.nn.functional.pad(data["response_mask"], (1, 0), value=1)
    tokens = data["responses"].shape[1]
    tu.assign_non_tensor(data, dp_size=1, batch_num_tokens=tokens, global_batch_size=None)
    return data


class LearningRun:
    """An agent that learns.

    Args:
        overrides: of a job of the recipe; its model, data and seed do not count.
        paths: what each prompt asks for, in the order of the data.
        rate: factor of the job's learning rates.
        batches: how many there will be.
    """

    def __init__(
        self,
        overrides: tuple[str, ...],
        model: Path,
        paths: Sequence[str],
        *,
        seed: int,
        rate: float,
        batches: int,
    ):
        self.config, self._job, losses = job_of(overrides)
        self._paths, self._seed, self._step = paths, seed, 0
        tokenizer = transformers.AutoTokenizer.from_pretrained(model)
        chats = [SymbolPath(str(number + 1)).messages() for number in range(len(SYMBOLS))]
        self._contexts = torch.tensor(
            [
                tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
                for chat in chats
            ]
        )
        self._texts = [
            tokenizer.decode([token], skip_special_tokens=True) for token in range(len(tokenizer))
        ]
        actor = transformers.AutoModelForCausalLM.from_pretrained(model)
        section, schedule = self.config.actor_rollout_ref.actor, (rate, batches)
        self._learners = {ACTOR: Learner(actor, losses[ACTOR], section, *schedule)}
        if CRITIC in losses:
            torch.manual_seed(seed)
            config = transformers.AutoConfig.from_pretrained(model)
            config.num_labels, config.classifier_dropout = 1, 0.0  # as verl's engines set them
            critic = transformers.AutoModelForTokenClassification.from_pretrained(
                model, config=config
            )
            self._learners[CRITIC] = Learner(critic, losses[CRITIC], self.config.critic, *schedule)

    def train_batch(self) -> dict[str, float]:
        """Plays a batch and trains on it: mean reward of a session, rows, pads and optimizer steps
        of the actor."""
        self._step += 1
        batch = self._play()
        columns = batch.columns | self._advantages(batch)
        rows_of, n_pads = self._cut(batch)
        for name, learner in self._learners.items():
            learner.update(self._contexts, rows_of[name], columns)
        return {
            "reward": float(np.mean(batch.reward_S)),
            "rows": len(batch.key_R),
            "pads": n_pads,
            "steps": len(rows_of[ACTOR]),
        }

    @torch.no_grad()
    def _play(self) -> Batch:
        # In float64, as the rollout of a whole job: what is drawn must not hang on rounding.
        model = copy.deepcopy(self._learners[ACTOR].model).double()
        chances = model(self._contexts).logits[:, -1].log_softmax(-1).exp().cumsum(-1).tolist()
        keys, symbols, replies, rewards, reward_S = [], [], [], [], []
        size, sessions = self.config.data.train_batch_size, self.config.actor_rollout_ref.rollout.n
        for place in range(size):
            path = self._paths[((self._step - 1) * size + place) % len(self._paths)]
            for session in range(sessions):
                name = f"training step {self._step} prompt {self._step}.{place} session {session}"
                task, turn = SymbolPath(path), 0
                while not task.done:
                    symbol = int(path[turn]) - 1
                    turn += 1
                    draw = Random(f"{self._seed} {name} turn {turn}").random()
                    token = bisect_right(chances[symbol], draw * chances[symbol][-1])
                    keys.append(row_key(f"{place:03}", session, turn - 1))
                    symbols.append(symbol)
                    replies.append(token)
                    task.react(self._texts[token])
                rewards += turn * [task.reward]  # verl gives each row the session's
                reward_S.append(task.reward)
        columns = {"symbols": torch.tensor(symbols), "responses": torch.tensor(replies)}
        return Batch(
            key_R=keys, columns=columns | {"rewards": torch.tensor(rewards)}, reward_S=reward_S
        )

    def _cut(self, batch: Batch) -> tuple[dict[str, RowsOfSteps], int]:
        """The mini-batches of each learner, and the pads."""
        n_rows = len(batch.key_R)
        tokens_R = [self._contexts.shape[1] + 1] * n_rows
        if self._job is not None:
            plan = plan_batch(Rows.from_keys(batch.key_R, tokens_R), self._job)
            return {name: plan.layouts[name].rows_M for name in self._learners}, plan.n_pads
        sizes, ranks = self.config.actor_rollout_ref, self.config.trainer.n_gpus_per_node
        mini_batch_rows = sizes.actor.ppo_mini_batch_size * sizes.rollout.n
        cells_MD, n_pads = deal_as_verl(tokens_R, dp_size=ranks, mini_batch_rows=mini_batch_rows)
        rows_M = [[row for row in chain(*cells) if row < n_rows] for cells in cells_MD]
        assert all(rows_M), "of pads alone"
        return dict.fromkeys(self._learners, rows_M), n_pads

    @torch.no_grad()
    def _advantages(self, batch: Batch) -> Columns:
        """What the rows are trained by: verl's advantages and returns, and outputs before the
        update."""
        outputs: Columns = {}
        for learner in self._learners.values():
            outputs |= learner.outputs(self._contexts, batch.columns)
        mask_R = torch.ones_like(batch.columns["responses"])
        known = {"token_level_rewards": batch.columns["rewards"], "response_mask": mask_R}
        known |= {"values": outputs["values"]} if "values" in outputs else {}
        uids = np.array([uid_of_key(key) for key in batch.key_R], dtype=object)
        algorithm = self.config.algorithm
        data = compute_advantage_for_multi_trajectories(
            DataProto.from_dict(
                {name: of.unsqueeze(1) for name, of in known.items()}, {"uid": uids}
            ),
            batch.key_R,
            algorithm.adv_estimator,
            gamma=algorithm.gamma,
            lam=algorithm.lam,
            num_repeat=self.config.actor_rollout_ref.rollout.n,
            norm_adv_by_std_in_grpo=algorithm.norm_adv_by_std_in_grpo,
            config=algorithm,
        )
        trained = {name: data.batch[name][:, 0].float() for name in ("advantages", "returns")}
        return trained | outputs | {"old_log_probs": outputs["log_probs"]}
