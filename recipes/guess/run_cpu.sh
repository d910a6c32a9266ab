#!/usr/bin/env bash
# The recipe on a CPU: a tiny random model on two FSDP2 ranks, or a real one on one.
#   bash run_cpu.sh [overrides...]                e.g. trainer.total_training_steps=3 padding.seed=3
#   SEED=1 OUT=outputs/seed1 bash run_cpu.sh      other data, other draws, and another tiny model
#   MODEL=outputs/smollm2 bash run_cpu.sh         a model's folder: here of python smollm2.py outputs/smollm2
#   PADDING= OUT=outputs/stock bash run_cpu.sh    stock verl
# A run that was stopped resumes from its last checkpoint when the same command is run again.
set -euo pipefail

recipe=$(cd "$(dirname "${BASH_SOURCE[0]:-.}")" && pwd)
size=tiny threads=1
[ -z "${MODEL:-}" ] || size=real threads=$(getconf _NPROCESSORS_ONLN)
out=${OUT:-outputs/guess_${size}}
mkdir -p "${out}/metrics"
out=$(cd "${out}" && pwd)
export VERL_PLATFORM=cpu VERL_LOGGING_LEVEL=${VERL_LOGGING_LEVEL:-WARN} OMP_NUM_THREADS=${threads} TOKENIZERS_PARALLELISM=false
export HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1 RAY_USAGE_STATS_ENABLED=0 RAY_prestart_worker_first_driver=0
export PYTHONPATH="${recipe}${PYTHONPATH:+:${PYTHONPATH}}"

seed=${SEED:-0}
model=${MODEL:-${out}/model}
[ -d "${model}" ] || verl-padding tiny-model "${model}" --seed "${seed}"
python "${recipe}/make_data.py" "${out}" --top 9 --seed "${seed}"
job=(
    +local=cpu
    +recipe=guess_${size}
    ${PADDING-+padding=fast padding.record=true}
    actor_rollout_ref.model.path="$(cd "${model}" && pwd)"
    data.train_files="${out}/train.parquet"
    data.val_files="${out}/val.parquet"
    data.seed="${seed}"
    actor_rollout_ref.rollout.seed="${seed}"
    actor_rollout_ref.actor.data_loader_seed="${seed}"
    actor_rollout_ref.rollout.agent.agent_loop_config_path="${recipe}/agent.yaml"
    trainer.default_local_dir="${out}/checkpoints"
    trainer.rollout_data_dir="${out}/rollouts"
    "$@"
)
verl-padding doctor "${job[@]}"
# verl overwrites the file of a run that it resumes: each start has one.
export VERL_FILE_LOGGER_PATH="${out}/metrics/$(date +%s).jsonl"
python -m verl.trainer.main_ppo "${job[@]}" hydra.run.dir="${out}/hydra" 2>&1 | tee -a "${out}/log"
cat "${out}"/metrics/*.jsonl > "${out}/metrics.jsonl"
verl-padding report "${out}" --out "${out}/report.html"
