"""Overrides of a job whose engines are Megatron's or VeOmni's, on a CPU; they take the extras of these names."""

ROLES = ("actor_rollout_ref.actor", "actor_rollout_ref.ref", "critic")
_MEGATRON = {
    "vanilla_mbridge": "true",  # Megatron-Bridge imports Transformer Engine
    "override_transformer_config.recompute_granularity": "null",  # toy models: time is scarcer than memory
    "override_transformer_config.recompute_method": "null",
    "override_transformer_config.recompute_num_layers": "null",
    "override_transformer_config.attention_backend": "auto",  # flash attention has no CPU kernels
    "override_transformer_config.masked_softmax_fusion": "false",
}
MEGATRON = (
    "+shared=engine_on_cpu",
    "model_engine=megatron",
    *(f"++{role}.megatron.{name}={value}" for role in ROLES for name, value in _MEGATRON.items()),
)
VEOMNI = (
    "+shared=engine_on_cpu",
    "model_engine=veomni",
    # The reference takes these from the actor.
    *(f"++{role}.veomni.attn_implementation=sdpa" for role in ("actor_rollout_ref.actor", "critic")),
    *(f"++{role}.veomni.moe_implementation=eager" for role in ("actor_rollout_ref.actor", "critic")),
    "++actor_rollout_ref.actor.veomni.seed=${actor_rollout_ref.rollout.seed}",
)
"""VeOmni shards what it loads, so a job has at least two ranks."""
ENGINES = "tests.engines"
"""The module that verl has to import first."""
ON_CPU = {"cpu": ("+local=cpu",), "megatron": MEGATRON, "veomni": VEOMNI}
