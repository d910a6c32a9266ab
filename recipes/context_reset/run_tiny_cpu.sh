#!/usr/bin/env bash
# The recipe on a CPU: two FSDP2 ranks, a tiny random model, five to ten minutes. Leave out +padding=fast for stock verl:
#   bash run_tiny_cpu.sh [overrides...]        e.g. trainer.total_training_steps=20 padding.seed=3
#   SEED=1 bash run_tiny_cpu.sh              another model, other data, other draws
#   PADDING=+padding=rows bash run_tiny_cpu.sh another strategy
#   PADDING= bash run_tiny_cpu.sh              stock verl
#   IMAGES=1 bash run_tiny_cpu.sh              sessions that start with an image
set -euo pipefail

out=${OUT:-outputs/context_reset_tiny}
mkdir -p "${out}"
out=$(cd "${out}" && pwd)
export VERL_PLATFORM=cpu VERL_LOGGING_LEVEL=${VERL_LOGGING_LEVEL:-WARN} OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false
export HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1 RAY_USAGE_STATS_ENABLED=0 RAY_prestart_worker_first_driver=0

overrides=$(python -m verl_padding.recipes.context_reset.job "${out}/assets" --seed "${SEED:-0}" ${IMAGES:+--images}) # by itself, so that its failure ends the script
mapfile -t job <<< "${overrides}"
job=(+local=cpu "${job[@]}" ${PADDING-+padding=fast padding.optimizer_steps=configured} trainer.rollout_data_dir="${out}/rollouts" "$@")
verl-padding doctor "${job[@]}"
export VERL_FILE_LOGGER_PATH="${out}/metrics.jsonl"
python -m verl.trainer.main_ppo "${job[@]}" hydra.run.dir="${out}/hydra" 2>&1 | tee -a "${out}/log"
verl-padding report "${out}" --out "${out}/report.html"
