"""The roles of a job, and the engine of each as verl's worker makes it: by verl's own config
classes, not from YAML.

A role's section and its engine's have some settings in common, and verl's classes decide which of
the two counts: those of the actor hand ``ulysses_sequence_parallel_size`` on to the engine, those
of the critic do not. What verl 0.9's workers write into an engine's config is then written here,
and a test compares the two. Importing this module imports no verl or torch.
"""

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from math import lcm, prod
from typing import Any

from omegaconf import DictConfig, OmegaConf

from verl_padding.errors import PaddingConfigError, refuse
from verl_padding.plan.calls import PaddedTo, SyncPoint

ACTOR_SECTION, REF_SECTION = "actor_rollout_ref.actor", "actor_rollout_ref.ref"
ACTOR_MODEL, CRITIC_MODEL = "actor_rollout_ref.model", "critic.model"
SIZES = ("max_token_len_per_gpu", "micro_batch_size_per_gpu")
"""Fields of an engine's config that bound micro-batches of updates; with ``infer_`` before them, of
other passes."""
FSDP_SIZES = {"Ulysses": "ulysses_sequence_parallel_size"}
PARALLEL_SIZES = {
    "fsdp": FSDP_SIZES,
    "fsdp2": FSDP_SIZES,
    "megatron": {
        "context": "context_parallel_size",
        "tensor": "tensor_model_parallel_size",
        "pipeline": "pipeline_model_parallel_size",
        "virtual pipeline": "virtual_pipeline_model_parallel_size",
        "expert": "expert_model_parallel_size",
        "expert tensor": "expert_tensor_parallel_size",
    },
    "veomni": {"Ulysses": "ulysses_parallel_size", "expert": "expert_parallel_size"},
}
"""Backend -> what the field knows a parallel size by -> its setting in the engine's config. By the
first one, verl multiplies the token budget of a GPU."""


def has_critic(config: DictConfig) -> bool:
    """Whether there is a critic, as verl's ``need_critic`` (trainer/ppo/utils.py) says."""
    enable = config.critic.enable
    return bool(config.algorithm.adv_estimator == "gae" if enable is None else enable)


def has_reference(config: DictConfig) -> bool:
    """Whether the actor is compared with a reference, as verl's ``need_reference_policy`` says."""
    return bool(
        config.algorithm.get("use_kl_in_reward", False)
        or config.actor_rollout_ref.actor.use_kl_loss
    )


def is_lora(config: DictConfig) -> bool:
    """Whether the actor is an adapter, by the rule of verl's v1 trainer."""
    model = config.actor_rollout_ref.model
    rank = (model.get("lora") or {}).get("rank") or model.get("lora_rank") or 0
    return rank > 0 or model.get("lora_adapter_path") is not None


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
    """transformers' name of the model's attention; None, or a name for each of its parts, where it
    is to choose."""

    @property
    def strategy(self) -> str:
        """Name of the backend."""
        return str(self.config.strategy)

    @property
    def model_section(self) -> str:
        """Section of the role's model."""
        return CRITIC_MODEL if self.section == "critic" else ACTOR_MODEL

    @property
    def megatron_override(self) -> Mapping[str, Any]:
        """Settings of Megatron's ``TransformerConfig`` that are the job's own, and not the
        bridge's."""
        return getattr(self.config, "override_transformer_config", None) or {}

    @property
    def padded_to(self) -> PaddedTo:
        """The length at which the engine computes a row: its own, or that of the longest in its
        micro-batch or local mini-batch."""
        if self.config.use_remove_padding:
            return "row"
        in_local_batches = self.strategy == "megatron" and self.config.pad_bshd_to_minibatch_max
        return "local_batch" if in_local_batches else "micro_batch"

    @property
    def row_multiple(self) -> int:
        """What the engine rounds the length of every row up to: Megatron alone does (verl 0.9,
        models/mcore/util.py), the others pack rows and round the whole micro-batch up
        (utils/ulysses.py)."""
        if self.strategy != "megatron":
            return 1
        context = self.size("context")
        multiple = self.size("tensor") * (2 * context if context > 1 else 1)
        is_fp8 = self.megatron_override.get("fp8") in ("e4m3", "hybrid")
        return lcm(16, multiple) if is_fp8 else multiple

    def size(self, word: str) -> int:
        """A parallel size, by its key in :data:`PARALLEL_SIZES`; 1 where the engine has none."""
        name = PARALLEL_SIZES[self.strategy].get(word, "")
        if (size := getattr(self.config, name, None)) is None and word == "expert tensor":
            return self.size("tensor")  # as Megatron-Core (parallel_state.py)
        return int(size or 1)

    @property
    def dp_size(self) -> int:
        """Data-parallel ranks, as verl assigns rows to them; at least 1."""
        # Of 16 GPUs, of which 2 share a row by tensor and 2 by pipeline, 4 have their own rows.
        return self.n_gpus // self.gpus_per_row or 1

    @property
    def gpus_per_row(self) -> int:
        """GPUs that work on the same rows."""
        return prod(map(self.size, ("Ulysses", "context", "tensor", "pipeline")))

    def pass_fields(self, dp_size: int, *, training: bool) -> dict[str, Any]:
        """Fields of the planner's ``Call`` (``plan/calls.py``) for a call of this role."""
        config = self.config
        fields: dict[str, Any] = {
            "dp_size": dp_size,
            "micro_batch_multiple": self.micro_batch_multiple,
            "sync_point": self._sync_point(training),
            "padded_to": self.padded_to,
            "has_pipeline": self.size("pipeline") > 1,
            "token_multiple": self.row_multiple,
        }
        if config.use_remove_padding and getattr(config, "pad_to_length", False):
            fields["bucket_tokens"] = int(config.pad_to_length_bucket)
        bound = "max_token_len_per_gpu" if config.use_dynamic_bsz else "micro_batch_size_per_gpu"
        name = bound if training else f"infer_{bound}"
        if (size := getattr(config, name)) is None:
            why = f"it cuts micro-batches with use_dynamic_bsz={config.use_dynamic_bsz}"
            refuse(f"{self.settings[name]}=None", why, "Set it.")
        if not config.use_dynamic_bsz:
            return fields | {"micro_batch_rows": int(size)}
        # verl multiplies it by the ranks that share a row by sequence: the first of the sizes.
        budget = int(size) * self.size(next(iter(PARALLEL_SIZES[self.strategy])))
        return fields | {"token_budget": budget, "budget_setting": self.settings[name]}

    @property
    def micro_batch_multiple(self) -> int:
        """Megatron's interleaved schedule needs a multiple of this many micro-batches, each with a
        row."""
        if self.size("virtual pipeline") < 2:
            return 1
        # Two virtual stages on a pipeline of 4 ranks take micro-batches four by four.
        group = self.megatron_override.get("microbatch_group_size_per_vp_stage")
        # Megatron's own default is the pipeline's size (core/model_parallel_config.py).
        return int(group or self.size("pipeline"))

    def _sync_point(self, training: bool) -> SyncPoint:
        """Where the role's ranks wait for each other: see ``Call`` (``plan/calls.py``)."""
        config, in_each, tensor = self.config, True, self.size("tensor")
        if self.strategy == "megatron":
            # Experts on several data-parallel ranks exchange tokens in each layer, where its FSDP
            # gathers parameters.
            experts = self.size("expert") * self.size("expert tensor")
            in_each = config.use_megatron_fsdp or experts > tensor * self.size("context")
        elif self.strategy in ("fsdp", "fsdp2") and config.fsdp_size == 1:
            # Every rank holds all parameters: ranks only wait for the reduction of gradients.
            in_each = training and not config.use_no_sync_for_gradient_accumulation
        return "micro_batch" if in_each else "mini_batch"


def role_engines(config: DictConfig) -> dict[str, RoleEngine]:
    """The engine of each role of a job (``actor``, ``ref``, ``critic``), in the order in which verl
    starts them."""
    sections = {"critic": "critic"} if has_critic(config) else {}
    # A LoRA actor without its adapter is its own reference, and has no model of one.
    if has_reference(config) and not is_lora(config):
        sections["ref"] = REF_SECTION
    sections["actor"] = ACTOR_SECTION
    return {role: worker_engine(config, section) for role, section in sections.items()}


def worker_engine(config: DictConfig, section: str) -> RoleEngine:
    """The engine of actor or reference as verl's ``ActorRolloutRefWorker.init_model`` makes it, or
    of the critic as ``_setup`` of its v1 trainer does. The critic's gets
    ``ppo_infer_max_token_len_per_gpu`` for both passes and nothing else, so its engine's section
    decides the rest. verl's YAML has none of these, so Hydra needs a + before them."""
    is_critic, is_ref = section == "critic", section == REF_SECTION
    own = ref_as_actor(config) if is_ref else _without_model(OmegaConf.select(config, section))
    role = _instantiate(own, section)
    engine = role.engine
    if is_critic:
        budget = "ppo_infer_max_token_len_per_gpu"
        engine.max_token_len_per_gpu = engine.infer_max_token_len_per_gpu = getattr(role, budget)
        names = ("micro_batch_size_per_gpu", "infer_micro_batch_size_per_gpu", "use_dynamic_bsz")
        settings = {name: f"+critic.{type(engine).strategy}.{name}" for name in names}
        settings["max_token_len_per_gpu"] = f"+critic.{budget}"
        settings["infer_max_token_len_per_gpu"] = f"+critic.{budget}"
    else:
        settings = {} if is_ref else {size: f"{section}.ppo_{size}" for size in SIZES}
        passes = section if is_ref else "actor_rollout_ref.rollout"
        settings |= {f"infer_{size}": f"{passes}.log_prob_{size}" for size in SIZES}
        for field, setting in settings.items():
            setattr(engine, field, OmegaConf.select(config, setting))
        engine.use_dynamic_bsz = bool(role.use_dynamic_bsz)
        prefix = "log_prob_" if is_ref else ""
        settings["use_dynamic_bsz"] = f"{section}.{prefix}use_dynamic_bsz"
    strategy = str(OmegaConf.select(config, f"{section}.strategy"))
    # The name in the class is that of its section; FSDP's has several engines, whose names begin
    # with it.
    is_known = engine.strategy in PARALLEL_SIZES
    if not is_known or not strategy.startswith(type(engine).strategy):
        why = f"the section's engine is a {type(engine).__name__}"
        fix = "Choose both by verl's config group model_engine: dp, megatron or veomni."
        refuse(f"{section}.strategy={strategy}", why, fix)
    model = OmegaConf.select(config, CRITIC_MODEL if is_critic else ACTOR_MODEL)
    # verl's TrainingWorker takes it from the model, whose config class has it True by default.
    engine.use_remove_padding = bool(model.get("use_remove_padding", True))
    attention = (model.get("override_config") or {}).get("attn_implementation", "flash_attention_2")
    return RoleEngine(
        section=section,
        settings=settings,
        config=engine,
        n_gpus=int(config.trainer.n_gpus_per_node) * int(config.trainer.nnodes),
        # VeOmni's does not look at the model's section.
        attention=engine.attn_implementation if engine.strategy == "veomni" else attention,
    )


def ref_as_actor(config: DictConfig) -> dict[str, Any]:
    """The reference's section as verl's worker hands it to the actor's config class, which has
    other names."""
    values = _without_model(config.actor_rollout_ref.ref)
    values["ppo_mini_batch_size"] = config.actor_rollout_ref.actor.ppo_mini_batch_size
    for name in ("micro_batch_size", *SIZES):
        values[f"ppo_{name}"] = values.pop(f"log_prob_{name}", None)
    values["use_dynamic_bsz"] = values.pop("log_prob_use_dynamic_bsz", False)
    return values


def _without_model(section: DictConfig) -> dict[str, Any]:
    """The values of a role's section except its model, which verl's classes would load."""
    values = OmegaConf.to_container(section, resolve=True)
    assert isinstance(values, dict)
    return {str(key): value for key, value in values.items() if key != "model"}


def _instantiate(values: dict[str, Any], section: str) -> Any:
    """verl's config object of a role."""
    from verl.utils.config import omega_conf_to_dataclass

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # verl's, about settings that it corrects
            return omega_conf_to_dataclass(OmegaConf.create(values))
    except Exception as error:  # verl asserts and raises; Hydra wraps both
        reason = " ".join(str(error).split())
        message = f"{section}: verl refuses this section ({reason}). Correct it."
        raise PaddingConfigError(message) from error
