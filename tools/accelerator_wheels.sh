#!/bin/sh
# Fill .whl with the packages that tools/accelerator_report.sh needs on a machine without a network:
#
#   tools/accelerator_wheels.sh [PYTHON ...]      versions of that machine's Python (default: 3.12)
#
#   MORE="numpy matplotlib"   packages that an image with torch usually has
#   MEGATRON_LM_PATH=DIR                   carry this checkout too, for the step beside its loop
#   LIMIT=64                               MiB of .whl and the files of the repository together
set -eu
cd "$(dirname "$0")/.."
limit=${LIMIT:-64}
python=${HOST_PYTHON:-python3}
mkdir -p .whl
for version in "${@:-3.12}"; do
    set -- --quiet --disable-pip-version-check --dest .whl --only-binary :all: --implementation cp \
        --python-version "$version"
    for glibc in 2_28 2_27 2_17 2014 1; do
        case $glibc in *_*) tag=manylinux_$glibc ;; *) tag=manylinux$glibc ;; esac
        set -- "$@" --platform "${tag}_$(uname -m)"
    done
    # Without their dependencies: they name torch, which the machine has.
    "$python" -m pip download "$@" --no-deps "$(grep '^megatron-core==' constraints.txt)" liger-kernel
    # pip reads markers with its own Python's version: pytest's two packages for 3.10 are named.
    "$python" -m pip download "$@" einops pybind11 regex six pydantic safetensors xxhash rich tqdm \
        psutil packaging pyyaml pytest pytest-timeout pytest-xdist hypothesis exceptiongroup tomli \
        ${MORE:-}
done
if [ -n "${MEGATRON_LM_PATH:-}" ]; then
    rm -rf .whl/Megatron-LM
    mkdir .whl/Megatron-LM
    cp -r "$MEGATRON_LM_PATH"/*.py "$MEGATRON_LM_PATH/megatron" .whl/Megatron-LM
    find .whl/Megatron-LM -name __pycache__ -prune -exec rm -rf {} +
fi
carried=$(du -sb .whl | cut -f1)
tree=$(git ls-files -z | xargs -0 du -cb | tail -n 1 | cut -f1)
total=$(((carried + tree + 1048575) / 1048576))
echo ".whl $((carried / 1048576)) MiB, repository $((tree / 1048576)) MiB, together $total of $limit MiB"
if [ "$total" -gt "$limit" ]; then
    echo "That is too much to carry. The largest: " >&2
    find .whl -type f -size +1024k -exec du -m {} + | sort -rn | head -n 6 >&2
    exit 1
fi
