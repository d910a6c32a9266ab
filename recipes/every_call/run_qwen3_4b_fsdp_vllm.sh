#!/usr/bin/env bash
# The recipe on GSM8K: Qwen3-4B, FSDP2 and vLLM on one node of 8 GPUs (configs/recipe/qwen3_4b_gsm8k.yaml). Shared
# prefixes are computed once:
#   PADDING=+padding=prompt bash run_qwen3_4b_fsdp_vllm.sh   every row computed by itself
#   PADDING= bash run_qwen3_4b_fsdp_vllm.sh                  stock verl
#   GSM8K in verl's parquet form: python examples/data_preprocess/gsm8k.py, in a checkout of verl
set -euo pipefail

out=${OUT:-outputs/every_call_qwen3_4b}
mkdir -p "${out}"
out=$(cd "${out}" && pwd)
model=${MODEL:-Qwen/Qwen3-4B}
data=${DATA:-$HOME/data/gsm8k}
recipe=$(python -c 'from verl_padding.recipes.every_call.job import HERE; print(HERE)')

job=(
    ${PADDING-+padding=fast}
    +recipe=qwen3_4b_gsm8k
    data.train_files=$data/train.parquet
    data.val_files=$data/test.parquet
    data.max_prompt_length=6144
    data.max_response_length=1024
    actor_rollout_ref.model.path=$model
    actor_rollout_ref.rollout.agent.agent_loop_config_path=$recipe/agent.yaml
    actor_rollout_ref.rollout.agent.default_agent_loop=every_call
    trainer.experiment_name=every_call_qwen3_4b
    trainer.rollout_data_dir=$out/rollouts
    "$@"
)
verl-padding doctor "${job[@]}"
export VERL_FILE_LOGGER_PATH="${out}/metrics.jsonl"
python -m verl.trainer.main_ppo "${job[@]}" hydra.run.dir="${out}/hydra" 2>&1 | tee -a "${out}/log"
verl-padding report "${out}" --out "${out}/report.html"
