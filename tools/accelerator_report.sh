#!/bin/sh
# Measure this machine's GPU or NPU in at most nine minutes, without a network:
#
#   tools/accelerator_report.sh [--dry] [--only PART ...] [--seconds N] [--out DIR]
#
# Packages that this machine lacks and tools/accelerator_wheels.sh put into .whl are installed into
# build/accelerator, for this run only. PYTHON=python3 names the interpreter, which must have torch.
set -eu
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
missing=$("$python" -c '
import importlib.metadata, pathlib, re, sys
plain = lambda name: re.sub(r"[-_.]+", "-", name).lower()
have = {plain(one.metadata["Name"]) for one in importlib.metadata.distributions()}
carried = {plain(one.name.split("-")[0]) for one in pathlib.Path(".whl").glob("*.whl")}
if lost := {"torch", "numpy", "psutil", "pytest"} - have - carried:
    sys.exit(f"{sys.executable} lacks {sorted(lost)}: name another with PYTHON=, install torch for the "
             "device, or carry the others: tools/accelerator_wheels.sh")
print(*sorted(carried - have))
')
if [ -n "$missing" ]; then
    rm -rf build/accelerator
    "$python" -m pip install --quiet --disable-pip-version-check --no-index --no-deps --upgrade \
        --no-compile --find-links .whl --target build/accelerator $missing
    export PYTHONPATH="$PYTHONPATH:$PWD/build/accelerator"
fi
exec "$python" tools/accelerator_report.py "$@"
