"""The engine of each role as verl's worker makes it: its values come from verl's own config classes, not from YAML.

A role's section and its engine's section have some settings in common, and verl's classes decide which of the two the
engine reads: those of the actor hand ``ulysses_sequence_parallel_size`` on to the engine, those of the critic do not.
This module then writes into the engine's config what verl 0.9's workers write, and a test compares the two.
"""

from __future__ import annotations

import re
import traceback
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

from omegaconf import DictConfig, OmegaConf

from verl_padding.errors import PaddingConfigError
from verl_padding.plan.calls import Meeting, PaddedTo

REF_SECTION = "actor_rollout_ref.ref"


PARALLEL_SIZES = {
    "fsdp": {"Ulysses": "ulysses_sequence_parallel_size"},
    "fsdp2": {"Ulysses": "ulysses_sequence_parallel_size"},
    "megatron": {
        "tensor": "tensor_model_parallel_size",
        "pipeline": "pipeline_model_parallel_size",
        "virtual pipeline": "virtual_pipeline_model_parallel_size",
        "context": "context_parallel_size",
        "expert": "expert_model_parallel_size",
    },
    "veomni": {"Ulysses": "ulysses_parallel_size", "expert": "expert_parallel_size"},
    "torchtitan": {"tensor": "tensor_parallel_size", "expert": "expert_parallel_size"},
}
"""Backend -> what the field knows a parallel size by -> its setting in the engine's config."""
GROUP_OF_STAGE = "microbatch_group_size_per_vp_stage"
"""Setting of Megatron's ``TransformerConfig``: micro-batches that a stage computes before it goes on with its next
layers."""


@dataclass(frozen=True, kw_only=True)
class RoleEngine:
    """What the plan must know of the engine of actor, reference or critic."""

    section: str
    """The role's section of the config."""
    settings: dict[str, str]
    """Field of ``config`` -> the setting that it comes from, for messages."""
    config: Any
    """verl's ``EngineConfig`` of the role's backend, as the engine gets it."""
    n_gpus: int
    """GPUs of the job, on which each role runs."""
    attention: Any
    """transformers' name of the model's attention, as the engine loads it; None, or a name for each part of the model,
    where transformers is to choose."""
    device: str
    """Kind of device that the job trains on."""
    trains_mtp: bool
    """Whether the model is to learn to predict several tokens (MTP), with a loss inside of its forward pass."""

    @property
    def strategy(self) -> str:
        """Name of the backend."""
        return str(self.config.strategy)

    @property
    def has_scheduler(self) -> bool:
        """Whether Megatron cuts the micro-batches of all ranks together, by a scheduler of its own."""
        return self.strategy == "megatron" and bool(self.config.dynamic_context_parallel)

    @property
    def model_section(self) -> str:
        """Section of the role's model."""
        return "critic.model" if self.section == "critic" else "actor_rollout_ref.model"

    @property
    def attention_setting(self) -> str:
        """Where the model's attention is set."""
        if self.strategy == "veomni":
            return f"{self.section}.veomni.attn_implementation"
        return f"{self.model_section}.override_config.attn_implementation"

    @property
    def padded_to(self) -> PaddedTo:
        """The length at which the engine computes a row: its own, or that of the longest in its micro-batch or cell."""
        config = self.config
        if config.use_remove_padding:
            return "row"
        if self.strategy != "megatron":
            return "micro_batch"
        return "cell" if config.pad_bshd_to_minibatch_max else "micro_batch"

    @property
    def shape(self) -> str:
        """The parallel sizes that are more than 1, in words: ``pipeline 2 x context 2``; empty if there are none."""
        sizes = {word: getattr(self.config, name, None) for word, name in PARALLEL_SIZES.get(self.strategy, {}).items()}
        return " x ".join(f"{word} {size}" for word, size in sizes.items() if (size or 1) > 1)

    @property
    def sequence_parallel_size(self) -> int:
        """Ranks that share a row; verl multiplies the token budget of a GPU by their number."""
        config = self.config
        if self.strategy == "megatron":
            return int(config.context_parallel_size)
        if self.strategy == "veomni":
            return int(config.ulysses_parallel_size)
        if self.strategy == "torchtitan":
            return int(config.tensor_parallel_size)  # as in its forward_backward_batch
        if self.strategy == "fsdp_turbo":
            return self._turbo_size("ulysses_parallel_size")
        return int(config.ulysses_sequence_parallel_size)

    @property
    def dp_size(self) -> int:
        """Data-parallel ranks, as verl deals rows out to them; at least 1."""
        config = self.config
        if self.strategy == "torchtitan":
            return int(config.data_parallel_shard_size) * int(config.data_parallel_replicate_size)
        if self.has_scheduler:
            return 1  # every rank gets all rows
        return self.n_gpus // self.model_ranks or 1

    @property
    def model_ranks(self) -> int:
        """Ranks that compute a row together."""
        ranks = self.sequence_parallel_size
        if self.strategy == "megatron":
            ranks *= int(self.config.tensor_model_parallel_size) * int(self.config.pipeline_model_parallel_size)
        if self.strategy == "fsdp_turbo":
            ranks *= self._turbo_size("tensor_parallel_size")
        return ranks

    def sizes_below(self, ranks: int) -> Iterator[int]:
        """Smaller sizes in the place of one of the sizes of :attr:`model_ranks`, the largest first, the last of them 1,
        with which the ranks that compute a row together divide the job's."""
        others = self.model_ranks // ranks
        return (size for size in range(ranks - 1, 0, -1) if self.n_gpus % (others * size) == 0)

    @property
    def megatron_sequence_parallel(self) -> bool:
        """Whether Megatron's tensor parallel ranks share the tokens between layers: the vanilla bridge has them do so
        whatever verl's setting is (``mbridge/core/llm_bridge.py``)."""
        config = self.config
        tensor = int(config.tensor_model_parallel_size) > 1
        by_bridge = tensor if config.vanilla_mbridge else bool(config.sequence_parallel)
        return tensor and bool((config.override_transformer_config or {}).get("sequence_parallel", by_bridge))

    def pass_fields(self, dp_size: int, *, training: bool) -> dict[str, Any]:
        """Fields of the planner's pass for a call of this role, except its cost model."""
        config, prefix = self.config, "" if training else "infer_"
        if self.has_scheduler:
            ranks = self.n_gpus // (int(config.tensor_model_parallel_size) * int(config.pipeline_model_parallel_size))
            return {
                "dp_size": dp_size,
                "token_budget": int(config.max_seqlen_per_dp_cp_rank) * ranks,
                "ranks_meet": "mini_batch",
                "budget_setting": f"{self.section}.megatron.max_seqlen_per_dp_cp_rank",
            }
        fields: dict[str, Any] = {
            "dp_size": dp_size,
            "micro_batch_multiple": self.micro_batch_multiple,
            "ranks_meet": self._ranks_meet(training),
            "padded_to": self.padded_to,
        }
        if config.use_remove_padding and getattr(config, "pad_to_length", False):
            fields["bucket_tokens"] = int(config.pad_to_length_bucket)
        if config.use_dynamic_bsz:
            name = f"{prefix}max_token_len_per_gpu"
            fields["token_budget"] = int(getattr(config, name)) * self.sequence_parallel_size
            fields["budget_setting"] = self.settings[name]
        else:
            fields["micro_batch_rows"] = int(getattr(config, f"{prefix}micro_batch_size_per_gpu"))
        return fields

    @property
    def micro_batch_multiple(self) -> int:
        """Megatron's interleaved schedule needs a multiple of this many micro-batches, each with a row."""
        if self.strategy != "megatron" or (self.config.virtual_pipeline_model_parallel_size or 1) < 2:
            return 1
        # Megatron's own default is the pipeline's size (core/model_parallel_config.py).
        return int(self._group_of_stage or self.config.pipeline_model_parallel_size)

    @property
    def why_micro_batch_multiple(self) -> str:
        """What :attr:`micro_batch_multiple` is, in words: ``pipeline 2``; empty if it is 1."""
        if self.micro_batch_multiple == 1:
            return ""
        group = self._group_of_stage
        return f"{GROUP_OF_STAGE} {group}" if group else f"pipeline {self.config.pipeline_model_parallel_size}"

    @property
    def _group_of_stage(self) -> int | None:
        return (self.config.override_transformer_config or {}).get(GROUP_OF_STAGE)

    def _ranks_meet(self, training: bool) -> Meeting:
        """Where the role's ranks wait for each other: see :class:`~verl_padding.plan.Pass`."""
        config = self.config
        if self.strategy == "megatron":
            # Experts that are spread over data-parallel ranks exchange tokens in each layer, and Megatron's FSDP
            # gathers parameters there.
            experts = int(config.expert_model_parallel_size) * int(
                config.expert_tensor_parallel_size or config.tensor_model_parallel_size
            )
            within = int(config.tensor_model_parallel_size) * int(config.context_parallel_size)
            return "micro_batch" if config.use_megatron_fsdp or experts > within else "mini_batch"
        if self.strategy in ("fsdp", "fsdp2") and config.fsdp_size == 1:
            # Every rank holds all parameters: ranks only wait for the reduction of gradients.
            synchronous = training and not config.use_no_sync_for_gradient_accumulation
            return "micro_batch" if synchronous else "mini_batch"
        return "micro_batch"

    def _turbo_size(self, name: str) -> int:
        return int((self.config.turbo_config.get("distributed") or {}).get(name) or 1)


def actor_engine(config: DictConfig) -> RoleEngine:
    """The actor's engine, as verl's ``ActorRolloutRefWorker.init_model`` makes it.

    Raises:
        PaddingConfigError: the size of micro-batches is not set, verl's config classes refuse the section, or it is the
            section of another engine than ``strategy`` names.
    """
    actor, rollout = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout
    # verl asserts it.
    if bool(actor.use_dynamic_bsz) != bool(rollout.log_prob_use_dynamic_bsz):
        raise PaddingConfigError(
            f"actor_rollout_ref.rollout.log_prob_use_dynamic_bsz={rollout.log_prob_use_dynamic_bsz}: "
            f"differs from actor_rollout_ref.actor.use_dynamic_bsz={actor.use_dynamic_bsz}, which verl does not allow. "
            "Set both to the same value."
        )
    settings = {
        "max_token_len_per_gpu": "actor_rollout_ref.actor.ppo_max_token_len_per_gpu",
        "micro_batch_size_per_gpu": "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu",
        "infer_max_token_len_per_gpu": "actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu",
        "infer_micro_batch_size_per_gpu": "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu",
    }
    return _of_worker(config, "actor_rollout_ref.actor", settings, dynamic=bool(actor.use_dynamic_bsz))


def ref_engine(config: DictConfig) -> RoleEngine:
    """The reference's engine, as verl's ``ActorRolloutRefWorker.init_model`` makes it.

    Raises:
        PaddingConfigError: as for the actor's.
    """
    settings = {
        "infer_max_token_len_per_gpu": "actor_rollout_ref.ref.log_prob_max_token_len_per_gpu",
        "infer_micro_batch_size_per_gpu": "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu",
    }
    dynamic = bool(config.actor_rollout_ref.ref.log_prob_use_dynamic_bsz)
    return _of_worker(config, REF_SECTION, settings, dynamic=dynamic)


def critic_engine(config: DictConfig) -> RoleEngine:
    """The critic's engine, as ``_setup`` of verl's v1 trainer makes it.

    It hands the engine ``ppo_infer_max_token_len_per_gpu`` for both passes and nothing else, so the section of the
    engine decides the rest.

    Raises:
        PaddingConfigError: as for the actor's.
    """
    critic = _instantiate(_resolved(config.critic), "critic")
    engine = critic.engine
    engine.infer_max_token_len_per_gpu = engine.max_token_len_per_gpu = critic.ppo_infer_max_token_len_per_gpu
    name = next(name for name in ("fsdp", "megatron", "veomni", "torchtitan") if getattr(critic, name, None) is engine)
    settings = {
        # verl's YAML has none of these, so Hydra needs a + before them.
        "max_token_len_per_gpu": "+critic.ppo_infer_max_token_len_per_gpu",
        "infer_max_token_len_per_gpu": "+critic.ppo_infer_max_token_len_per_gpu",
        "micro_batch_size_per_gpu": f"+critic.{name}.micro_batch_size_per_gpu",
        "infer_micro_batch_size_per_gpu": f"+critic.{name}.infer_micro_batch_size_per_gpu",
    }
    _refuse_unset({field: getattr(engine, field) for field in settings}, settings, dynamic=engine.use_dynamic_bsz)
    return _role_engine(config, "critic", settings, engine, config.critic.model)


def _of_worker(config: DictConfig, section: str, settings: dict[str, str], *, dynamic: bool) -> RoleEngine:
    """The engine of a role of verl's ``ActorRolloutRefWorker``.

    Args:
        settings: field of the engine's config -> setting that the worker writes into it.
        dynamic: whether micro-batches are cut by tokens, not by rows.
    """
    values = {field: OmegaConf.select(config, setting) for field, setting in settings.items()}
    _refuse_unset(values, settings, dynamic=dynamic)
    role = ref_as_actor(config) if section == REF_SECTION else _resolved(OmegaConf.select(config, section))
    engine = _instantiate(role, section).engine
    engine.use_dynamic_bsz = dynamic
    for field, value in values.items():
        setattr(engine, field, value)
    return _role_engine(config, section, settings, engine, config.actor_rollout_ref.model)


def ref_as_actor(config: DictConfig) -> dict[str, Any]:
    """The reference's section as verl's worker hands it to the actor's config class, which has other names."""
    values = _resolved(config.actor_rollout_ref.ref)
    values["ppo_mini_batch_size"] = config.actor_rollout_ref.actor.ppo_mini_batch_size
    for name in ("micro_batch_size", "micro_batch_size_per_gpu", "max_token_len_per_gpu"):
        values[f"ppo_{name}"] = values.pop(f"log_prob_{name}", None)
    values["use_dynamic_bsz"] = values.pop("log_prob_use_dynamic_bsz", False)
    return values


def _role_engine(
    config: DictConfig, section: str, settings: dict[str, str], engine: Any, model: DictConfig
) -> RoleEngine:
    _refuse_another_engines_section(section, engine)
    _refuse_another_engines_name(section, engine, OmegaConf.select(config, f"{section}.strategy"))
    # verl's TrainingWorker takes these two from the model, whose config class has them True and False by default.
    engine.use_remove_padding = bool(model.get("use_remove_padding", True))
    engine.use_fused_kernels = bool(model.get("use_fused_kernels", False))
    n_gpus = int(config.trainer.n_gpus_per_node) * int(config.trainer.nnodes)
    attention = (model.get("override_config") or {}).get("attn_implementation", "flash_attention_2")
    mtp = model.get("mtp") or {}
    if engine.strategy == "veomni":  # which does not look at the model's section
        attention = engine.attn_implementation
    return RoleEngine(
        section=section,
        settings=settings,
        config=engine,
        n_gpus=n_gpus,
        attention=attention,
        device=config.trainer.device,
        trains_mtp=bool(mtp.get("enable")) and bool(mtp.get("enable_train")),
    )


CLASS_OF_STRATEGY = {
    "fsdp": "FSDPEngineConfig",
    "fsdp2": "FSDPEngineConfig",
    "megatron": "McoreEngineConfig",
    "veomni": "VeOmniEngineConfig",
    "torchtitan": "TorchtitanEngineConfig",
}
"""verl's class of the engine's section; verl's config groups choose the section, and ``strategy`` the engine."""


def _refuse_another_engines_section(section: str, engine: Any) -> None:
    strategy, known = engine.strategy, CLASS_OF_STRATEGY.get(engine.strategy)
    if known is not None and known not in [each.__name__ for each in type(engine).__mro__]:
        group = {"fsdp": "dp", "fsdp2": "dp"}.get(strategy, strategy)
        raise PaddingConfigError(
            f"{section}.strategy={strategy}: the section's engine is a {type(engine).__name__}. Choose verl's config "
            f"of that engine too: model_engine={group}."
        )


def _refuse_another_engines_name(section: str, engine: Any, named: str | None) -> None:
    """The engine is that of the role's section; verl's workers look at the role's ``strategy`` for what is left."""
    of_name, of_engine = (CLASS_OF_STRATEGY.get(str(name)) for name in (named, engine.strategy))
    if of_name and of_engine and of_name != of_engine:
        raise PaddingConfigError(
            f"{section}.strategy={named}: the section's engine is {engine.strategy}, and what verl asks of the name it "
            f"would ask of another one (such as whether routes are replayed). Set it to {engine.strategy}."
        )


def _refuse_unset(values: dict[str, Any], settings: dict[str, str], *, dynamic: bool) -> None:
    for field, value in values.items():
        if value is None and field.endswith("max_token_len_per_gpu") == dynamic:
            raise PaddingConfigError(
                f"{settings[field]}=None: dynamic batch sizes need a token budget. Set it."
                if dynamic
                else f"{settings[field]}=None: without dynamic batch sizes the rows of a micro-batch must be set."
            )


def _resolved(section: DictConfig) -> dict[str, Any]:
    """The values of a role's section except its model, which verl's classes would load."""
    values = OmegaConf.to_container(section, resolve=True)
    assert isinstance(values, dict)
    return {str(key): value for key, value in values.items() if key != "model"}


def _instantiate(values: dict[str, Any], name: str) -> Any:
    """verl's config object of a role.

    Raises:
        PaddingConfigError: verl's classes refuse the section.
    """
    from verl.utils.config import omega_conf_to_dataclass

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # verl's, about settings that it corrects
            return omega_conf_to_dataclass(OmegaConf.create(values))
    except Exception as error:  # verl asserts and raises; Hydra wraps both
        _refuse_settings_of_other_engines(values, name)
        reason = first_words(error.__cause__ or error)
        named = settings_named(OmegaConf.create(values), error, reason, within=name)
        raise PaddingConfigError(f"{name}: verl refuses this section ({reason}). Correct {named or 'it'}.") from error


def _refuse_settings_of_other_engines(values: dict[str, Any], name: str) -> None:
    """Refuses settings of a role that verl's class of their section does not have, all of them at once."""
    from hydra.utils import get_class

    sections = {name: values, **{f"{name}.{key}": value for key, value in values.items() if isinstance(value, dict)}}
    unknown, classes = [], []
    for key, section in sections.items():
        try:
            target = get_class(section["_target_"])
        except (
            KeyError,
            ImportError,
            AttributeError,
            ValueError,
        ):  # no class's section, or the caller's error tells it
            continue
        if isinstance(target, type) and is_dataclass(target):
            known = {field.name for field in fields(target)}
            left = [f"{key}.{each}" for each in section if each not in known and not re.fullmatch("_.*_", each)]
            unknown += left
            classes += [target.__name__] if left else []
    if unknown:
        raise PaddingConfigError(
            f"{', '.join(unknown)}: {' and '.join(classes)} of verl has no such setting. Leave it out "
            f"({' '.join(f'~{setting}' for setting in unknown)})."
        )


def settings_named(config: DictConfig, error: BaseException, reason: str, *, within: str = "") -> str:
    """Settings, with their values, that the reason of a refusal has the names of; "" for none.

    Args:
        error: of Hydra, which says in which section of the config it was raised; else it is the config itself.
        reason: in words, or the line of code that has asserted something.
        within: key of the config, in front of those of its settings.
    """
    told = re.search(r"^full_key: ([\w.]+)", str(error), re.MULTILINE)
    section = OmegaConf.select(config, told[1]) if told else config
    if not isinstance(section, DictConfig):
        return ""
    key = ".".join(filter(None, (within, told[1] if told else "")))
    attributes, words = re.findall(r"\bself\.(\w+)", reason), re.findall(r"\w+", reason)
    names = [
        name
        for name in words
        if name in attributes or "_" in name or str(section.get(name)) in words[words.index(name) :]
    ]
    named = {f"{key}.{name}".lstrip("."): section[name] for name in names if name in section}
    return " or ".join(f"{setting}={value}" for setting, value in named.items())


def first_words(error: BaseException) -> str:
    """The first line of what an exception says; of one that says nothing, the line of code that has raised it."""
    if said := str(error).strip():
        return said.split("\n")[0]
    lines = traceback.extract_tb(error.__traceback__)
    return f"{type(error).__name__}: {lines[-1].line}" if lines else type(error).__name__
