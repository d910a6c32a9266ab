#!/usr/bin/env bash
# The recipe with Qwen3-4B, FSDP2 and vLLM on one node of 8 GPUs (configs/recipe/qwen3_4b_gsm8k.yaml, but for the data).
#   PADDING= bash run_qwen3_4b_fsdp_vllm.sh       stock verl
set -euo pipefail

recipe=$(cd "$(dirname "${BASH_SOURCE[0]:-.}")" && pwd)
out=${OUT:-outputs/guess_qwen3_4b}
mkdir -p "${out}"
out=$(cd "${out}" && pwd)
model=${MODEL:-Qwen/Qwen3-4B}
export PYTHONPATH="${recipe}${PYTHONPATH:+:${PYTHONPATH}}"

python "${recipe}/make_data.py" "${out}"
job=(
    ${PADDING-+padding=fast}
    +recipe=qwen3_4b_gsm8k
    data.train_files=$out/train.parquet
    data.val_files=$out/val.parquet
    data.train_batch_size=60
    data.max_prompt_length=256
    data.max_response_length=16
    actor_rollout_ref.model.path=$model
    actor_rollout_ref.actor.ppo_mini_batch_size=15
    actor_rollout_ref.rollout.agent.agent_loop_config_path=$recipe/agent.yaml
    actor_rollout_ref.rollout.agent.default_agent_loop=guess
    trainer.experiment_name=guess_qwen3_4b
    trainer.default_local_dir=$out/checkpoints
    trainer.rollout_data_dir=$out/rollouts
    "$@"
)
verl-padding doctor "${job[@]}"
export VERL_FILE_LOGGER_PATH="${out}/metrics.jsonl"
python -m verl.trainer.main_ppo "${job[@]}" hydra.run.dir="${out}/hydra" 2>&1 | tee -a "${out}/log"
verl-padding report "${out}" --out "${out}/report.html"
