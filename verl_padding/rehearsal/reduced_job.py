"""A job's config, reduced to what a CPU rehearses; all that is not named here stays the user's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf, open_dict, read_write

from verl_padding import configs
from verl_padding.job.composition import JobArguments, compose_job
from verl_padding.job.modes import MODE_PREFIX, SEPARATE_ASYNC

CONFIGS = Path(configs.__file__).parent
ACTOR, REF, ROLLOUT, MODEL = (f"actor_rollout_ref.{part}" for part in ("actor", "ref", "rollout", "model"))
RANKS, PROMPTS, SESSIONS, STEPS, BUDGET = 2, 4, 2, 1, 2048
"""Sizes of the rehearsed job; the budget is in tokens of a micro-batch."""
SHORT_RESPONSE = 512
BUDGETS = (
    f"{ACTOR}.ppo_max_token_len_per_gpu",
    f"{REF}.log_prob_max_token_len_per_gpu",
    f"{ROLLOUT}.log_prob_max_token_len_per_gpu",
    "critic.ppo_max_token_len_per_gpu",
    "+critic.ppo_infer_max_token_len_per_gpu",  # of which no YAML of verl knows
    "critic.forward_max_token_len_per_gpu",
)
ROWS_OF_A_MICRO_BATCH = (
    f"{ACTOR}.ppo_micro_batch_size_per_gpu",
    f"{REF}.log_prob_micro_batch_size_per_gpu",
    f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu",
    "critic.ppo_micro_batch_size_per_gpu",
    "critic.forward_micro_batch_size_per_gpu",
    "+critic.fsdp.micro_batch_size_per_gpu",
    "+critic.fsdp.infer_micro_batch_size_per_gpu",
)
KEPT = (
    f"{MODEL}.use_remove_padding",
    "critic.model.use_remove_padding",
    f"{ACTOR}.use_dynamic_bsz",
    f"{REF}.log_prob_use_dynamic_bsz",
    f"{ROLLOUT}.log_prob_use_dynamic_bsz",
    "critic.use_dynamic_bsz",
)
"""What the config of a CPU would change, and the job's value is kept of."""
SERVED = {
    "reward.reward_model.enable": False,
    "distillation.enabled": False,
    "algorithm.filter_groups.enable": False,  # of a random model, all groups earn the same
    f"{ROLLOUT}.enable_rollout_routing_replay": False,
    f"{ROLLOUT}.quantization": None,
    f"{MODEL}.use_liger": False,
    f"{MODEL}.use_fused_kernels": False,
    f"{MODEL}.enable_activation_offload": False,
    f"{ROLLOUT}.trace.backend": None,
    f"{ROLLOUT}.prometheus.enable": False,
    "global_profiler.tool": None,
    "trainer.val_only": False,
}
"""What takes devices or servers that are not here -> its value in the rehearsal; reported where the job asks for it."""
NO_REWARD = """def compute_score(**_):
    return 0.0
"""
"""A reward function in the place of the job's."""
TOOLS = tuple(f"{ROLLOUT}.multi_turn.{key}" for key in ("tool_config_path", "function_tool_path"))
OF_ENGINES = ("param_offload", "optimizer_offload", "offload_policy", "full_determinism")
ENGINES = (f"{ACTOR}.fsdp_config", f"{REF}.fsdp_config", "critic.fsdp")


def without_servers(config: DictConfig) -> list[str]:
    """Turns off what takes devices or servers that are not here, and says in words what that is."""
    asked = {setting: value for setting, value in SERVED.items() if _value(config, setting, value) not in (value, None)}
    left_out = [f"{setting} ({_value(config, setting)})" for setting in asked]
    with read_write(config), open_dict(config):
        for setting, value in asked.items():
            OmegaConf.update(config, setting, value)
        config.actor_rollout_ref.model.use_shm = False
    return left_out


def reduced(
    config: DictConfig,
    *,
    model: Path,
    folder: Path,
    attention: str = "sdpa",
    longest_row: int = 0,
    with_tools: bool = True,
    with_rewards: bool = True,
) -> tuple[DictConfig, list[str]]:
    """The reduced config, and in words what of the job is not rehearsed.

    Args:
        config: of the job; it is not changed.
        model: the folder of its shrunk model.
        folder: where all that the job writes goes.
        attention: implementation that the model has on a CPU.
        longest_row: tokens of the longest row that the job is known to make; 0 if none is known.
    """
    config = config.copy()
    left_out = without_servers(config)
    if (critic := _value(config, "critic.model.path")) not in (None, _value(config, f"{MODEL}.path")):
        left_out.append(f"critic.model.path ({critic}): the critic has the actor's model")
    left_out.append(f"{ROLLOUT}.name={config.actor_rollout_ref.rollout.name}: replies are scripted")
    strategy = str(OmegaConf.select(config, f"{ACTOR}.strategy"))
    small = config.copy()
    if strategy not in ("fsdp", "fsdp2"):
        small = _on_fsdp2(config)
        left_out.append(f"the engine {strategy}: FSDP2 takes its place")
    local = OmegaConf.merge(
        OmegaConf.load(CONFIGS / "shared/engine_on_cpu.yaml"), OmegaConf.load(CONFIGS / "local/cpu.yaml")
    )
    assert isinstance(local, DictConfig)
    del local["defaults"], local.data["val_files"]
    with read_write(small), open_dict(small):
        small.merge_with(local)
        changes = _changes(config, model, folder, attention, longest_row)
        if not with_tools:
            changes |= dict.fromkeys(TOOLS)
            left_out.append("tools")
        if not with_rewards:
            (folder / "no_reward.py").write_text(NO_REWARD)
            changes |= {"reward.custom_reward_function.path": str(folder / "no_reward.py")}
            changes |= {"reward.custom_reward_function.name": "compute_score"}
            changes |= {"reward.reward_manager.source": "register", "reward.reward_manager.name": "naive"}
            left_out.append("rewards: all are 0")
        for setting, value in changes.items():
            OmegaConf.update(small, setting.lstrip("+"), value, force_add=True)
        small.ray_kwargs.ray_init.pop("address", None)
    return small, left_out


def _changes(config: DictConfig, model: Path, folder: Path, attention: str, longest_row: int) -> dict[str, Any]:
    """Setting -> its value in the rehearsal."""
    mini, train = (_value(config, f"{ACTOR}.ppo_mini_batch_size"), config.data.train_batch_size)
    one_step = mini is None or mini >= train or _mode(config) == SEPARATE_ASYNC
    mini_batch = PROMPTS if one_step else PROMPTS // 2
    changes: dict[str, Any] = {
        "data.train_batch_size": PROMPTS,
        "data.gen_batch_size": None if _value(config, "data.gen_batch_size") is None else PROMPTS,
        "data.train_max_samples": PROMPTS * (STEPS + 4),
        "data.val_max_samples": PROMPTS,
        "data.val_batch_size": None,
        "data.filter_overlong_prompts_workers": 1,
        f"{ACTOR}.ppo_mini_batch_size": mini_batch,
        "critic.ppo_mini_batch_size": mini_batch,
        f"{ROLLOUT}.n": min(SESSIONS, config.actor_rollout_ref.rollout.n),
        f"{ROLLOUT}.val_kwargs.n": 1,
        f"{ROLLOUT}.dtype": "float32",
        f"{ROLLOUT}.max_num_seqs": 256,
        f"{ROLLOUT}.n_gpus_per_node": RANKS,
        f"{ROLLOUT}.tensor_model_parallel_size": RANKS,
        f"{ROLLOUT}.data_parallel_size": 1,
        f"{ROLLOUT}.pipeline_model_parallel_size": 1,
        f"{ROLLOUT}.calculate_log_probs": _value(config, f"{ROLLOUT}.calculate_log_probs", default=True),
        f"{ROLLOUT}.load_format": "dummy",
        f"{MODEL}.path": str(model),
        "critic.model.path": str(model),
        "trainer.n_gpus_per_node": RANKS,
        "trainer.total_training_steps": STEPS,
        "trainer.total_epochs": 1000,
        "trainer.critic_warmup": 0,
        "trainer.val_before_train": False,
        "trainer.test_freq": STEPS if _validates(config) else -1,
        "trainer.save_freq": -1,
        "trainer.resume_mode": "disable",
        "trainer.default_local_dir": str(folder / "checkpoints"),
        "trainer.default_hdfs_dir": None,
        "trainer.rollout_data_dir": str(folder / "rollouts"),
        "trainer.validation_data_dir": None,
        "trainer.logger": ["file"],
        "trainer.log_val_generations": 0,
        "ray_kwargs.timeline_json_file": None,
        "ray_kwargs.ray_init.num_gpus": 2 * RANKS,
        "trainer.v1.separate_async.parameter_sync_step": 1,
        f"{MODEL}.override_config": {"attn_implementation": attention},
        "critic.model.override_config": {"attn_implementation": attention},
    }
    changes |= {f"{MODEL}.{name}": None for name in ("hf_config_path", "tokenizer_path", "lora_adapter_path")}
    changes["critic.model.tokenizer_path"] = None
    # Rows of another run are of other lengths; where none was seen, prompts may be as long as they are let be.
    row = 2 * longest_row or config.data.max_prompt_length + SHORT_RESPONSE
    for setting in BUDGETS:
        if (budget := _value(config, setting)) is not None:
            changes[setting] = min(budget, max(BUDGET, row))
    for setting in ROWS_OF_A_MICRO_BATCH:
        if _value(config, setting) is not None:
            changes[setting] = 1
    changes |= {setting: value for setting in KEPT if (value := _value(config, setting)) is not None}
    for section in ENGINES:
        changes |= {f"{section}.{name}": False for name in OF_ENGINES}
        changes |= {f"{section}.fsdp_size": -1, f"{section}.ulysses_sequence_parallel_size": 1}
    changes |= {f"{role}.ulysses_sequence_parallel_size": 1 for role in (ACTOR, REF, "critic")}
    if (_value(config, f"{MODEL}.lora_rank") or 0) > 0 or (_value(config, f"{MODEL}.lora.rank") or 0) > 0:
        changes[f"{MODEL}.lora.merge"] = True
    if config.get("padding") is not None:
        changes |= {"padding.timing": False, "padding.timing_dir": None}
    return changes


def _validates(config: DictConfig) -> bool:
    return bool(config.trainer.get("val_before_train", True) or config.trainer.test_freq > 0)


def _mode(config: DictConfig) -> str:
    return str(config.trainer.v1.trainer_mode).removeprefix(MODE_PREFIX)


def _value(config: DictConfig, setting: str, default: Any = None) -> Any:
    value = OmegaConf.select(config, setting.lstrip("+"))
    return default if value is None else value


def _on_fsdp2(config: DictConfig) -> DictConfig:
    """The job with the engine of a CPU; what both engines have is the job's."""
    base = compose_job(JobArguments())
    with read_write(base), open_dict(base):
        for key in config:
            engine_differs = key in ("actor_rollout_ref", "critic")
            base[key] = _common(config[key], base[key]) if engine_differs else config._get_node(key)
    return base


def _common(mine: DictConfig, base: DictConfig) -> DictConfig:
    out = base.copy()
    with open_dict(out):
        for key in mine:
            node, other = mine._get_node(key), base._get_node(key) if key in base else None
            if key == "optim":
                out.optim.lr = mine.optim.lr
            elif key in ("megatron", "veomni", "torchtitan", "strategy", "_target_"):
                continue
            elif isinstance(node, DictConfig) and isinstance(other, DictConfig):
                out[key] = _common(node, other)
            elif key in base or not len(base):
                out._set_item_impl(key, node)
    return out
