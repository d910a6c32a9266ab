#!/usr/bin/env bash
# On a machine with one GPU and no network, in a checkout:
#   bash benchmarks/one_gpu/measure.sh KIT SITE OUT learn
#   bash benchmarks/one_gpu/measure.sh KIT SITE OUT exact speed job -- --rounds 5
# KIT holds packages.tar.xz (or its parts), SITE is where it is unpacked, once; OUT gets the results. Seconds of each
# part: LEARN, EXACT, SPEED, JOB, MEGATRON. A part that fails or is stopped leaves what it has shown.
set -uo pipefail
kit=$(realpath "$1") site=$2 out=$3
shift 3
parts=()
while [ $# -gt 0 ] && [ "$1" != -- ]; do parts+=("$1"); shift; done
[ "${1:-}" = -- ] && shift
mkdir -p "${out}" "${site}"
site=$(realpath "${site}") out=$(realpath "${out}")
python=${PYTHON:-python3}

if [ ! -f "${site}/complete" ]; then
    unpack="import sys, tarfile as t; t.open(fileobj=sys.stdin.buffer, mode='r|xz').extractall(sys.argv[1], filter='data')"
    cat "${kit}"/packages.tar.xz* | "${python}" -c "${unpack}" "${site}" || { echo "no packages"; exit 1; }
    touch "${site}/complete"
fi
# The checkout as if it were installed: with its configs and recipes, and its entry point for verl.
own="${site}/own"
rm -rf "${own}"
mkdir -p "${own}/verl_padding" "${own}/verl_padding-0.dist-info"
ln -s "${PWD}"/verl_padding/* "${PWD}/configs" "${PWD}/recipes" "${own}/verl_padding/"
ln -s "${PWD}/benchmarks" "${PWD}/tests" "${own}/"
printf 'Metadata-Version: 2.1\nName: verl_padding\nVersion: 0\n' > "${own}/verl_padding-0.dist-info/METADATA"
printf '[verl.plugins]\nverl_padding = verl_padding.plugin\n' > "${own}/verl_padding-0.dist-info/entry_points.txt"
export PYTHONSAFEPATH=1 PYTHONPATH="${own}:${site}" PYTHONUNBUFFERED=1 VERL_LOGGING_LEVEL=ERROR HF_HUB_OFFLINE=1 RAY_USAGE_STATS_ENABLED=0

declare -A seconds=([learn]=${LEARN:-500} [exact]=${EXACT:-150} [speed]=${SPEED:-240} [job]=${JOB:-260} [megatron]=${MEGATRON:-300})
for part in "${parts[@]:-learn}"; do
    begun=$(date +%s) limit=${seconds[${part}]}
    command=(-m benchmarks.one_gpu "${part}" --out "${out}" --seconds $((limit - 25)) "$@")
    # Started in the checkout: the tests' folder is the one that is linked, pytest's plug-ins are not there.
    [ "${part}" = megatron ] && command=(-m pytest -o addopts= -p no:cacheprovider -m "gpu and megatron" tests/gpu)
    timeout -k 5 "${limit}" "${python}" "${command[@]}" > "${out}/${part}.log" 2>&1
    code=$?
    echo "${part}: ended with ${code} after $(($(date +%s) - begun)) s"
    [ "${code}" = 0 ] || grep -v '^{' "${out}/${part}.log" | tail -n 15 | cut -c -400
    grep -h '^{' "${out}/${part}.log" | cut -c -260
    [ "${part}" = job ] && [ "${code}" != 0 ] && tail -n 40 "${out}/job/log" | cut -c -400
done
