#!/bin/sh
# Measure this machine's GPU or NPU in at most nine minutes, without a network:
#
#   tools/accelerator_report.sh [--dry] [--only PART ...] [--out DIR]
#
# Packages that tools/accelerator_wheels.sh put into .whl are installed into build/accelerator, for
# this run only, and never in the place of what the machine has. PYTHON=python3 names the interpreter.
set -eu
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
packages=$PWD/build/accelerator
if [ -d .whl ]; then
    "$python" tools/accelerator_wheels.py install .whl "$packages"
fi
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}:$packages"
exec "$python" tools/accelerator_report.py "$@"
