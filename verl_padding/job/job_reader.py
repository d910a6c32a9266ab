"""Reads the shape of a job from a verl config: what the planner must respect, and what cannot be run.

Everything here runs on the driver, before any worker starts. Facts of verl 0.9.1 that are not plain in its
config are named where they are used.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import verl
from omegaconf import DictConfig, OmegaConf

from verl_padding.config import MIN_PAD_LENGTH, PaddingConfig
from verl_padding.errors import PaddingConfigError
from verl_padding.job.adapter_refusals import refuse_adapter, refuse_unmerged_adapter
from verl_padding.job.calls import ACTOR, CALL_BY_NAME, CALLS, CRITIC, LOG_PROB, REF, VALUES
from verl_padding.job.correction_refusals import refuse_lost_correction
from verl_padding.job.engine_refusals import refuse_engines
from verl_padding.job.known_verl import KNOWN_VERL, is_known, refuse_unknown_verl
from verl_padding.job.model_cost import has_tower, read_model_config, read_model_cost
from verl_padding.job.model_refusals import refuse_model
from verl_padding.job.modes import MODE_PREFIX, SEPARATE_ASYNC, stock_mode
from verl_padding.job.pad_length import pad_length
from verl_padding.job.role_engine import RoleEngine, actor_engine, critic_engine, ref_engine
from verl_padding.job.roles_of_job import has_critic, has_reference, has_separate_reference
from verl_padding.job.weighings import refuse_equal_sessions
from verl_padding.pads.vision_families import image_maker
from verl_padding.plan import COST_MODELS, Job, Pass, PlanError, TransformerCost, Update
from verl_padding.plan.counted import counted

STORAGES_BY_KEY = ("RayStore", "MooncakeStore", "Yuanrong")
"""TransferQueue's storages that hold each field of a row by itself, as far as TransferQueue 0.1 has them."""
UNKNOWN_LOSS_HORIZON = "seq-mean-token-sum-norm"


def translate_plan_error(refusal: PlanError) -> str:
    """What the planner refuses, in the words of a job's settings.

    >>> translate_plan_error(PlanError("strategy='lcm': 8 rows, not a multiple of dp_size=3"))
    "padding.strategy='lcm': 8 rows, not a multiple of 3 data-parallel ranks"
    """
    told = re.sub(r"(?<![\w.])(strategy|packer|sharing|cost_model|seed)=", r"padding.\1=", str(refusal))
    told = re.sub(r"(?<![\w.])pad_tokens=", "padding.pad_length=", told)
    return re.sub(r"\bdp_size=(\d+)", lambda ranks: counted(int(ranks[1]), "data-parallel rank"), told)


def check_job(config: DictConfig, mode: str | None = None) -> JobReader:
    """Refuses, before any worker starts, a job that cannot run; returns the reader of its config.

    Args:
        mode: the verl mode that the job's trainer extends, if it is a trainer under a name of its own.

    Raises:
        PaddingConfigError: one message with the setting, its value and the fix.
    """
    refuse_unknown_verl()
    padding = PaddingConfig.from_section(config.get("padding"))
    if not config.trainer.use_v1:
        raise PaddingConfigError(
            "trainer.use_v1=False: the padded trainers extend verl's v1 trainers. Set trainer.use_v1=True."
        )
    if config.get("async_training") is not None:
        raise PaddingConfigError(
            "async_training=..: verl's fully asynchronous trainer is not one that the padded trainers extend. "
            f"Choose trainer.v1.trainer_mode={SEPARATE_ASYNC} with verl.trainer.main_ppo, or leave +padding out."
        )
    mode = mode or stock_mode(config.trainer.v1.trainer_mode)
    _check_mode_section(config, mode)
    sync_step = parameter_sync_step(config, mode)
    if sync_step != 1 and mode != SEPARATE_ASYNC:
        raise PaddingConfigError(
            f"trainer.v1.{mode}.parameter_sync_step={sync_step}: this mode's rollout sleeps from a step's first local "
            "update on, and the next update would wait for it. Set it to 1, or choose "
            f"trainer.v1.trainer_mode={SEPARATE_ASYNC}."
        )
    if config.data.train_batch_size % sync_step:
        raise PaddingConfigError(
            f"data.train_batch_size={config.data.train_batch_size}: not a multiple of "
            f"trainer.v1.{mode}.parameter_sync_step={sync_step}. Set it to a multiple."
        )
    _check_packer(padding)
    _check_storage(config)
    refuse_equal_sessions(config, padding)
    refuse_lost_correction(config)
    _check_loss(config.actor_rollout_ref.actor, "actor_rollout_ref.actor")
    if has_critic(config):
        _check_loss(config.critic, "critic")
    reader = JobReader(config, padding, mode)
    reader.step_job(dp_sizes=reader.configured_dp_sizes(), updates_actor=True, seed=padding.seed)
    if reader.engines["actor"].has_scheduler:
        _check_teacher_of_scheduler(config)
    reader.refuse_roles()
    model = config.actor_rollout_ref.model
    # A model that has to be fetched first is checked by the trainer, once verl has fetched it.
    path = model.get("hf_config_path") or model.path
    if path and Path(path).expanduser().is_dir():
        # Code that comes with a model may need packages that only the training machines have.
        with suppress(ImportError):
            reader.refuse_models(fetched=False)
    return reader


def _check_mode_section(config: DictConfig, mode: str) -> None:
    """Refuses settings of a mode where verl does not look for them: under another name than verl's own."""
    name = config.trainer.v1.trainer_mode
    section = config.trainer.v1.get(name)
    if name == mode or not isinstance(section, DictConfig):
        return
    # A trainer of somebody's own may have settings of its own there, which are for its code to read.
    of_mode = {"parameter_sync_step", *(config.trainer.v1.get(mode) or ())}
    for key in map(str, section):
        if name.startswith(MODE_PREFIX) or key in of_mode:
            raise PaddingConfigError(
                f"trainer.v1.{name}.{key}={section[key]}: verl does not read this, since the trainer {name} extends "
                f"verl's trainer of mode {mode} and uses its settings. Set trainer.v1.{mode}.{key} instead."
            )


def parameter_sync_step(config: DictConfig, mode: str) -> int:
    """Local updates per global step, which share ``train_batch_size``; 1 in the colocated modes.

    Raises:
        PaddingConfigError: fewer than 1.
    """
    steps = int(config.trainer.v1.get(mode, {}).get("parameter_sync_step", 1))
    if steps < 1:
        raise PaddingConfigError(
            f"trainer.v1.{mode}.parameter_sync_step={steps}: a global step has a local update or more. Set it to 1."
        )
    return steps


class JobReader:
    """The parts of a verl config that decide how a batch is planned.

    Args:
        mode: the verl mode that the job's trainer extends; by default the one that the name of the trainer says.
    """

    def __init__(self, config: DictConfig, padding: PaddingConfig, mode: str | None = None):
        self._config = config
        self._mode = mode or stock_mode(config.trainer.v1.trainer_mode)
        self.padding = padding
        """The job's section ``padding``."""
        self._actor = config.actor_rollout_ref.actor
        self._rollout = config.actor_rollout_ref.rollout
        self._ref = config.actor_rollout_ref.ref
        self._critic = config.critic
        self._model_costs: dict[str, TransformerCost | None] = {}
        self._uses_critic = has_critic(config)
        self._uses_ref = has_reference(config)

    def configured_dp_sizes(self) -> dict[str, int]:
        """Data-parallel size of each worker call, as the config says; the worker groups know for sure."""
        return {call: engine.dp_size for call, engine in self._engine_of_call.items()}

    @cached_property
    def engines(self) -> dict[str, RoleEngine]:
        """The engine of each role of the job (``actor``, ``ref``, ``critic``), in the order in which verl starts them.

        Raises:
            PaddingConfigError: verl would refuse one, or one does not work with another or with the plan.
        """
        engines = {}
        if self._uses_critic:
            engines["critic"] = critic_engine(self._config)
        if has_separate_reference(self._config):
            engines["ref"] = ref_engine(self._config)
        engines["actor"] = actor_engine(self._config)
        refuse_engines(list(engines.values()), self.padding)
        return engines

    @property
    def _engine_of_call(self) -> dict[str, RoleEngine]:
        return {call.name: self.engines[call.role] for call in CALLS if call.role in self.engines}

    @cached_property
    def model_config(self) -> dict[str, Any]:
        """The actor's Hugging Face config, with the job's overrides.

        Raises:
            PaddingConfigError: it cannot be read.
        """
        return read_model_config(self._config.actor_rollout_ref.model, "actor_rollout_ref")

    @cached_property
    def has_vision(self) -> bool:
        """Whether the actor has a vision tower. verl knows no processor for some models that have one (Gemma 3)."""
        return self.model_config.get("vision_config") is not None

    @cached_property
    def has_images(self) -> bool:
        """Whether rows of the actor may have images or sounds, wherever its config has the tower for them."""
        return has_tower(self.model_config)

    def refuse_roles(self) -> None:
        """Refuses what the engines of roles that train would not do for the job, as the roles' sections show it.

        Raises:
            PaddingConfigError: an adapter is asked for that an engine does not make or the rollout does not get, or
                what no CPU has.
        """
        for name, engine in self.engines.items():
            if name == "ref":  # it has no adapter, nor an optimizer
                continue
            refuse_adapter(self._config, engine)
        refuse_unmerged_adapter(self._config, self._mode)

    def refuse_models(self, *, fetched: bool = True) -> None:
        """Refuses an actor or critic that pads or shared prefixes would change, or that an engine does not compute.

        With a vision tower, it must be known what pads must show it; and rows share only what depends on the tokens up
        to it.

        Args:
            fetched: whether a critic may be fetched; else one that is not in a folder here passes.

        Raises:
            PaddingConfigError: one is refused, it is not known, or a model's config cannot be read.
        """
        models = {"actor_rollout_ref": self.model_config}
        if self._uses_critic and (fetched or Path(self._config.critic.model.path).expanduser().is_dir()):
            models["critic"] = read_model_config(self._config.critic.model, "critic")
        for section, model in models.items():
            engines = [engine for engine in self.engines.values() if engine.model_section == f"{section}.model"]
            engines.reverse()  # the actor's first, whose sizes its reference takes where it has none of its own
            refuse_model(section, self._config[section].model.path, model, engines, self.padding)
        if self.has_vision:
            image_maker(self.padding.multimodal, self.model_config)

    @cached_property
    def n_experts(self) -> int | None:
        """Routed experts of a layer of the actor, as verl counts them; None for a dense model."""
        from verl.trainer.ppo.metric_utils import infer_rollout_moe_num_experts

        count: int | None = infer_rollout_moe_num_experts(self._config.actor_rollout_ref.model)
        return count

    @property
    def has_teacher(self) -> bool:
        """Whether the actor's loss reads what a teacher says of each row."""
        return bool(OmegaConf.select(self._config, "distillation.enabled", default=False))

    def pad_length(self, at_least: int = MIN_PAD_LENGTH) -> int:
        """Tokens of a pad, no fewer than ``at_least``; see :func:`~verl_padding.job.pad_length.pad_length`."""
        sections = {"actor": self._actor, "ref": self._ref, "critic": self._critic}
        return pad_length(self.padding, [sections[role] for role in self.engines], at_least)

    def step_job(
        self, *, dp_sizes: Mapping[str, int], updates_actor: bool, seed: int, pad_tokens: int | None = None
    ) -> Job:
        """The planner's job of one local update.

        Args:
            pad_tokens: tokens of a pad; None for the length of a pad without an image.
            dp_sizes: data-parallel size of each worker call, by the names of this module.
            updates_actor: False while ``trainer.critic_warmup`` lasts.
            seed: seed of the planner's shuffle.

        Raises:
            PaddingConfigError: a size does not divide another.
        """
        updates, inference = {}, {}
        if updates_actor:
            updates[ACTOR] = Update(
                prompts_per_mini_batch=self._actor.ppo_mini_batch_size,
                mini_batch_setting="actor_rollout_ref.actor.ppo_mini_batch_size",
                shuffle=bool(self._actor.shuffle),
                **self._pass_fields(ACTOR, dp_sizes),
            )
        if self._uses_critic:
            updates[CRITIC] = Update(
                prompts_per_mini_batch=self._critic.ppo_mini_batch_size,
                mini_batch_setting="critic.ppo_mini_batch_size",
                shuffle=bool(self._critic.shuffle),
                **self._pass_fields(CRITIC, dp_sizes),
            )
            inference[VALUES] = Pass(**self._pass_fields(VALUES, dp_sizes))
        separate_ref = "ref" in self.engines
        sync_step = parameter_sync_step(self._config, self._mode)
        batch_of = "data.train_batch_size"
        if sync_step > 1:
            batch_of += f" / trainer.v1.{self._mode}.parameter_sync_step"
        # A LoRA actor without its adapter is its own reference: verl then calls the actor's log-prob pass.
        if (self._uses_ref and not separate_ref) or not self._bypasses_log_prob:
            inference[LOG_PROB] = self._log_prob_pass(LOG_PROB, dp_sizes)
        if separate_ref:
            inference[REF] = self._log_prob_pass(REF, dp_sizes)
        try:
            return Job(
                strategy=self.padding.strategy,
                prompts=self._config.data.train_batch_size // sync_step,
                prompts_setting=batch_of,
                sessions_per_prompt=self._rollout.n,
                sessions_setting="actor_rollout_ref.rollout.n",
                updates=updates,
                inference=inference,
                # verl's _get_required_batch_multiple starts from these, whatever trains in the step.
                row_multiple=dp_sizes[ACTOR],
                pad_tokens=pad_tokens or self.pad_length(),
                # With the others, each call brings its own where it has one.
                cost_model=self.padding.cost_model if self.padding.cost_model in COST_MODELS else "attention",
                packer=self.padding.packer,
                sharing=self.padding.sharing,
                seed=seed,
            )
        except PlanError as refusal:
            raise PaddingConfigError(translate_plan_error(refusal)) from refusal

    def call_job(self, call: str, *, dp_sizes: Mapping[str, int], seed: int, pad_tokens: int) -> Job:
        """The planner's job of one worker call by itself, with the arguments of :meth:`step_job`.

        Raises:
            PaddingConfigError: no worker of this job can make the call.
        """
        job = self.step_job(dp_sizes=dp_sizes, updates_actor=True, seed=seed, pad_tokens=pad_tokens)
        updates = {name: update for name, update in job.updates.items() if name == call}
        inference = {name: one_pass for name, one_pass in job.inference.items() if name == call}
        if call == LOG_PROB:  # the actor can always make it, though a step may do without
            inference = {LOG_PROB: self._log_prob_pass(LOG_PROB, dp_sizes)}
        if not updates and not inference:
            raise PaddingConfigError(
                f"worker call {call!r}: this job has no worker for it. Leave it out, or turn on what it needs: a "
                "reference (actor_rollout_ref.actor.use_kl_loss, algorithm.use_kl_in_reward) or a critic."
            )
        return replace(job, updates=updates, inference=inference)

    @property
    def _bypasses_log_prob(self) -> bool:
        return bool((self._config.algorithm.get("rollout_correction") or {}).get("bypass_mode", False))

    def _log_prob_pass(self, call: str, dp_sizes: Mapping[str, int]) -> Pass:
        as_update = ACTOR if self.padding.log_prob_micro_batches == "update" else None
        return Pass(as_update=as_update, **self._pass_fields(call, dp_sizes))

    def _pass_fields(self, call: str, dp_sizes: Mapping[str, int]) -> dict[str, Any]:
        known = CALL_BY_NAME[call]
        fields = self.engines[known.role].pass_fields(dp_sizes[call], training=known.trains)
        return fields | {"cost_model": self._cost_model("critic" if known.role == "critic" else "actor_rollout_ref")}

    def _cost_model(self, section: str) -> TransformerCost | None:
        """What rows cost the model of a config section; None if not asked for, or unknown where clocks will tell."""
        asked_for = self.padding.cost_model
        if asked_for not in ("model", "measured"):
            return None
        if section not in self._model_costs:
            try:
                self._model_costs[section] = read_model_cost(self._config[section].model, section)
            except PaddingConfigError:
                if asked_for == "model":
                    raise
                self._model_costs[section] = None
        return self._model_costs[section]


def _check_packer(padding: PaddingConfig) -> None:
    if padding.sharing != "off" and padding.packer != "plan":
        raise PaddingConfigError(
            f"padding.sharing={padding.sharing!r}: only the plan keeps rows that extend each other in one micro-batch. "
            "Set padding.packer=plan."
        )
    if padding.packer == "verl":
        return
    if not is_known(verl.__version__):
        raise PaddingConfigError(
            f"padding.packer={padding.packer!r}: it replaces a function of verl {KNOWN_VERL}, but this is verl "
            f"{verl.__version__}. Set padding.packer=verl."
        )


def _check_storage(config: DictConfig) -> None:
    storage = OmegaConf.select(config, "transfer_queue.backend.storage_backend")
    if storage in STORAGES_BY_KEY:
        raise PaddingConfigError(
            f"transfer_queue.backend.storage_backend={storage}: TransferQueue cannot clear from it what has no field, "
            "such as verl's prompts, and the job would end at its first step. Set it to SimpleStorage."
        )


def _check_teacher_of_scheduler(config: DictConfig) -> None:
    if not OmegaConf.select(config, "distillation.enabled"):
        return
    from verl.trainer.distillation.losses import DISTILLATION_SETTINGS_REGISTRY

    mode = config.distillation.distillation_loss.loss_mode
    settings = DISTILLATION_SETTINGS_REGISTRY.get(mode)  # verl refuses what it does not know
    if settings is not None and settings.use_topk:
        raise PaddingConfigError(
            f"distillation.distillation_loss.loss_mode={mode}: verl does not run it together with "
            "dynamic_context_parallel=True. Set dynamic_context_parallel of the engines to False."
        )


def _check_loss(role: DictConfig, name: str) -> None:
    if role.loss_agg_mode == UNKNOWN_LOSS_HORIZON and role.loss_scale_factor is None:
        raise PaddingConfigError(
            f"{name}.loss_scale_factor=None: with {name}.loss_agg_mode={role.loss_agg_mode} verl then divides by "
            "the padded width of each micro-batch, which changes with the rows it happens to hold. Set "
            f"{name}.loss_scale_factor to a constant, such as data.max_response_length."
        )
