#!/usr/bin/env bash
# The recipe on GSM8K: Qwen3-4B, FSDP2 and vLLM on one node of 8 GPUs. Leave out +padding=prompt for stock verl:
#   PADDING= bash run_qwen3_4b_fsdp_vllm.sh
#   GSM8K in verl's parquet form: python examples/data_preprocess/gsm8k.py, in a checkout of verl
set -euo pipefail

model=${MODEL:-Qwen/Qwen3-4B}
data=${DATA:-$HOME/data/gsm8k}
recipe=$(python -c 'from verl_padding.recipes.subagents.job import HERE; print(HERE)')

job=(
    ${PADDING-+padding=prompt}
    algorithm.adv_estimator=grpo
    algorithm.norm_adv_by_std_in_grpo=true
    data.train_files=$data/train.parquet
    data.val_files=$data/test.parquet
    data.train_batch_size=128
    data.max_prompt_length=2048
    data.max_response_length=6144
    data.filter_overlong_prompts=true
    +data.apply_chat_template_kwargs.enable_thinking=false
    actor_rollout_ref.model.path=$model
    actor_rollout_ref.model.use_remove_padding=true
    actor_rollout_ref.model.enable_gradient_checkpointing=true
    actor_rollout_ref.actor.strategy=fsdp2
    actor_rollout_ref.actor.optim.lr=1e-6
    actor_rollout_ref.actor.ppo_mini_batch_size=32
    actor_rollout_ref.actor.use_dynamic_bsz=true
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu=24576
    actor_rollout_ref.actor.use_kl_loss=true
    actor_rollout_ref.actor.kl_loss_coef=0.001
    actor_rollout_ref.actor.kl_loss_type=low_var_kl
    actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-mean
    actor_rollout_ref.ref.log_prob_use_dynamic_bsz=true
    actor_rollout_ref.ref.log_prob_max_token_len_per_gpu=49152
    actor_rollout_ref.rollout.name=vllm
    actor_rollout_ref.rollout.n=8
    actor_rollout_ref.rollout.tensor_model_parallel_size=1
    actor_rollout_ref.rollout.gpu_memory_utilization=0.6
    actor_rollout_ref.rollout.log_prob_use_dynamic_bsz=true
    actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu=49152
    actor_rollout_ref.rollout.multi_turn.enable=true
    actor_rollout_ref.rollout.multi_turn.format=hermes
    actor_rollout_ref.rollout.multi_turn.max_parallel_calls=4
    actor_rollout_ref.rollout.multi_turn.max_assistant_turns=6
    actor_rollout_ref.rollout.multi_turn.max_tool_response_length=4096
    actor_rollout_ref.rollout.multi_turn.tool_config_path=$recipe/tools.yaml
    actor_rollout_ref.rollout.agent.agent_loop_config_path=$recipe/agent.yaml
    actor_rollout_ref.rollout.agent.default_agent_loop=subagents
    trainer.n_gpus_per_node=8
    trainer.nnodes=1
    trainer.total_training_steps=200
    trainer.save_freq=50
    trainer.test_freq=10
    trainer.project_name=verl_padding
    trainer.experiment_name=subagents_qwen3_4b
    "$@"
)
verl-padding doctor "${job[@]}"
python -m verl.trainer.main_ppo "${job[@]}"
