"""What is known of a verl job from its config, on the driver: what a plan must respect, and what a
model forbids."""

import logging
from collections.abc import Mapping
from functools import cached_property
from math import lcm
from typing import Any

from omegaconf import DictConfig, OmegaConf

from verl_padding.config import MIN_PAD_LENGTH, PaddingConfig
from verl_padding.errors import PaddingConfigError, refuse
from verl_padding.job.calls import ACTOR, CALL_BY_NAME, CALLS, CRITIC, LOG_PROB, REF, VALUES
from verl_padding.job.engine_refusals import check_engines, check_model, length_incompatibilities
from verl_padding.job.loss_weightings import packing_incompatibility
from verl_padding.job.model_config import (
    config_path,
    folder_here,
    has_linear_attention,
    has_tower,
    read_model_config,
)
from verl_padding.job.role_engine import (
    ACTOR_MODEL,
    CRITIC_MODEL,
    has_reference,
    role_engines,
)
from verl_padding.job.saving_rules import (
    old_log_prob_incompatibilities,
    zero_advantage_incompatibilities,
)
from verl_padding.job.savings import OLD_LOG_PROBS, PACKER, SHARING, ZERO_ADVANTAGE_ROWS, Savings
from verl_padding.pads.vision_families import image_maker
from verl_padding.plan import Job, Pass, PlanError, Update
from verl_padding.plan.cost import up_to_multiple

logger = logging.getLogger(__name__)

MIN_BRANCH_TOKENS = 128
"""Of models with linear attention: a row that branches off another makes two pieces, and the rule's
kernels keep a state for each 64 tokens in any case."""


class VerlJob:
    """A job of verl, as far as it decides how a batch is planned, sent to workers and trained on.

    It is checked when it is made, and refused by a PaddingConfigError. What it saves is known then,
    but for what its models, its workers and its rows forbid.
    """

    def __init__(self, config: DictConfig, padding: PaddingConfig, mode: str):
        self.config = config
        """verl's config of the job."""
        self.mode = mode
        """The verl mode that the job's trainer extends."""
        self.padding = padding
        self.savings = Savings(padding)
        """What the job computes less; :meth:`check_models`, the workers and the rows may turn off
        more."""
        self.may_branch = True
        """Whether rows that branch may share what is before, and not only full prefixes: not in a
        model in which the workers find that they mix (``worker/cross_contamination.py``)."""
        self._with_states: set[str] = set()
        self._fetched = False
        self.parameter_sync_step = int(
            config.trainer.v1.get(mode, {}).get("parameter_sync_step", 1)
        )
        """Local updates per global step, which share its prompts."""
        self.engines = role_engines(config)
        """The engine of each role of the job."""
        check_engines(list(self.engines.values()), self.savings)
        if incompatibility := packing_incompatibility(config):
            for saving in (PACKER, SHARING):
                self.savings.block(saving, [incompatibility])
        job, updates = self.planner_job(), self.parameter_sync_step
        needed = old_log_prob_incompatibilities(config, job, local_updates=updates)
        self.savings.block(ZERO_ADVANTAGE_ROWS, zero_advantage_incompatibilities(config))
        self.savings.block(OLD_LOG_PROBS, needed)
        if job.optimizer_steps == "by_rows":
            rows = job.mini_batch_rows(job.updates[ACTOR])
            self.savings.limits[OLD_LOG_PROBS] = f"until a batch has more than {rows} rows"

    @property
    def skips_old_log_probs(self) -> bool:
        """Whether an update takes its own log-probs for the old policy's, without a pass before
        it."""
        return self.savings.is_on(OLD_LOG_PROBS)

    @property
    def drops_zero_advantage(self) -> bool:
        """Whether the actor's update computes nothing for rows without an advantage."""
        return self.savings.is_on(ZERO_ADVANTAGE_ROWS)

    @property
    def shares(self) -> bool:
        """Whether tokens that rows have in common are computed once."""
        return self.savings.is_on(SHARING)

    def updates_actor(self, step: int) -> bool:
        """Whether the actor trains in a global step: the critic may have to warm up first."""
        return bool(self.config.trainer.critic_warmup <= step)

    @cached_property
    def model_config(self) -> dict[str, Any]:
        """The actor's Hugging Face config, with the job's overrides; one that cannot be read is
        refused."""
        return read_model_config(self.config, ACTOR_MODEL, fetched=self._fetched)

    @cached_property
    def has_vision(self) -> bool:
        """Whether the actor has a vision tower. verl knows no processor for some models that have
        one (Gemma 3)."""
        return self.model_config.get("vision_config") is not None

    @cached_property
    def has_images(self) -> bool:
        """Whether rows of the actor may have images or sounds, wherever its config has the tower
        for them."""
        return has_tower(self.model_config)

    def check_models(self, *, fetched: bool = True) -> None:
        """Refuses an actor or critic that pads or shared prefixes would change, whose images pads
        cannot have, or whose config cannot be read. If none may be ``fetched``, a critic that is
        not in a folder here passes."""
        self._fetched = fetched
        models = {ACTOR_MODEL: self.model_config}
        critic = config_path(self.config.critic.model) if "critic" in self.engines else None
        if critic and (fetched or folder_here(critic)):
            models[CRITIC_MODEL] = read_model_config(self.config, CRITIC_MODEL, fetched=fetched)
        for section, model in models.items():
            named = f"{section}.path={OmegaConf.select(self.config, section).path}"
            self.savings.block(SHARING, length_incompatibilities(named, model))
            # The actor's first, whose sizes its reference takes where it has none of its own.
            engines = reversed(self.engines.values())
            check_model(named, model, [each for each in engines if each.model_section == section])
        if self.has_vision:
            image_maker(self.padding.multimodal, self.model_config)
        self._with_states = {name for name in models if has_linear_attention(models[name])}

    def forbid_branches(self, why: str) -> None:
        """Has rows share nothing less than all of a row, where they share at all and have not been
        forbidden yet; says so in the log and among the savings."""
        if not (self.shares and self.may_branch):
            return
        self.may_branch = False
        self.savings.limits[SHARING] = limit = f"full-prefix sharing only: {why}"
        logger.warning("verl_padding: %s", limit)

    def pad_length(self, at_least: int = MIN_PAD_LENGTH) -> int:
        """Tokens of a pad: what the job says, or the fewest that no engine rounds up, as a shorter
        one costs the same. Fewer than ``at_least``, which a pad needs for what it shows the model,
        are refused."""
        # With multiples of 4, a pad that needs 5 tokens gets 8.
        multiple = lcm(*(engine.row_multiple for engine in self.engines.values()))
        shortest = up_to_multiple(max(at_least, MIN_PAD_LENGTH), multiple)
        length = shortest if self.padding.pad_length == "auto" else int(self.padding.pad_length)
        if length < shortest or length % multiple:
            fitting = up_to_multiple(max(length, shortest), multiple)
            refuse(
                f"padding.pad_length={length}",
                f"the job's engines take rows in multiples of {multiple} tokens, and a pad has at "
                f"least {shortest}",
                f"Set padding.pad_length=auto, or {fitting}.",
            )
        return length

    def planner_job(
        self,
        *,
        dp_sizes: Mapping[str, int] | None = None,
        updates_actor: bool = True,
        seed: int | None = None,
        pad_tokens: int | None = None,
    ) -> Job:
        """The planner's job of one local update; refused if a size does not divide another.

        ``dp_sizes`` has the data-parallel size of each call, by the names of ``job/calls.py``; by
        default the config's, but worker groups know for sure. ``updates_actor`` is False while
        ``trainer.critic_warmup`` lasts. ``seed`` of the planner's shuffle is by default the
        configured one, and ``pad_tokens`` are by default the length of a pad without an image.
        """
        config, padding = self.config, self.padding
        sizes = dp_sizes or {
            call.name: self.engines[call.role].dp_size
            for call in CALLS
            if call.role in self.engines
        }
        # An update trains in mini-batches; a pass may reuse the micro-batches of the actor's.
        planned = {
            name: self._planned_call(name, sizes) for name in self._calls_of_update(updates_actor)
        }
        updates = {name: call for name, call in planned.items() if isinstance(call, Update)}
        inference = {name: call for name, call in planned.items() if isinstance(call, Pass)}
        shared_out = ""
        if self.parameter_sync_step > 1:
            shared_out = f" / trainer.v1.{self.mode}.parameter_sync_step"
        try:
            return Job(
                strategy=padding.strategy,
                optimizer_steps=padding.optimizer_steps,
                prompts=config.data.train_batch_size // self.parameter_sync_step,
                prompts_setting="data.train_batch_size" + shared_out,
                sessions_per_prompt=config.actor_rollout_ref.rollout.n,
                sessions_setting="actor_rollout_ref.rollout.n",
                updates=updates,
                inference=inference,
                # verl's _get_required_batch_multiple starts from these, whatever trains in the
                # step.
                row_multiple=sizes[ACTOR],
                pad_tokens=pad_tokens or self.pad_length(),
                cost_model=padding.cost_model,
                packer="plan" if self.savings.is_on(PACKER) else "verl",
                sharing="on" if self.shares else "off",
                may_branch=self.may_branch,
                seed=padding.seed if seed is None else seed,
            )
        except PlanError as refusal:
            raise PaddingConfigError(str(refusal)) from refusal

    def _planned_call(self, name: str, dp_sizes: Mapping[str, int]) -> Pass | Update:
        """A worker call as the planner knows it."""
        call = CALL_BY_NAME[name]
        engine = self.engines[call.role]
        fields = engine.pass_fields(dp_sizes[name], training=call.trains)
        if engine.model_section in self._with_states:
            fields["min_branch_tokens"] = MIN_BRANCH_TOKENS
        if not call.trains:
            return Pass(as_update=None if name == VALUES else ACTOR, **fields)
        role = OmegaConf.select(self.config, engine.section)
        return Update(
            prompts_per_mini_batch=role.ppo_mini_batch_size,
            mini_batch_setting=f"{engine.section}.ppo_mini_batch_size",
            shuffle=bool(role.shuffle),
            drops_zero_advantage=name == ACTOR and self.drops_zero_advantage,
            **fields,
        )

    def _calls_of_update(self, updates_actor: bool) -> list[str]:
        """Names of the worker calls that a local update makes."""
        bypass = OmegaConf.select(self.config, "algorithm.rollout_correction.bypass_mode")
        critic, ref = "critic" in self.engines, "ref" in self.engines
        # A LoRA actor without its adapter is its own reference: verl then calls the actor's
        # log-prob pass.
        log_prob = not bypass and not self.skips_old_log_probs
        log_prob = log_prob or (has_reference(self.config) and not ref)
        made = {ACTOR: updates_actor, CRITIC: critic, VALUES: critic, LOG_PROB: log_prob, REF: ref}
        return [call for call, is_made in made.items() if is_made]
