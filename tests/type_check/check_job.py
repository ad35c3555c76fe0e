"""Checks many small jobs in children of one process: ``python -m tests.type_check.check_job``.

Reads ``[[flags, fault, repair], ...]`` from standard input, prints one JSON object a line. A fault
is a name in :mod:`tests.type_check.faults`; the repair is switched off.
"""

from __future__ import annotations

import faulthandler
import json
import shlex
import sys
from contextlib import nullcontext
from typing import Any

SMALL = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --vocab-size 128 "
    "--micro-batch-size 1 --position-embedding-type rope --normalization RMSNorm --swiglu "
    "--disable-bias-linear "
)
WARM = (
    "--tensor-model-parallel-size 2 --sequence-parallel --nproc 2",
    "--tensor-model-parallel-size 2 --sequence-parallel --nproc 2 --num-experts 4 "
    "--moe-ffn-hidden-size 32 --expert-model-parallel-size 2 --expert-tensor-parallel-size 1 "
    "--moe-grouped-gemm --moe-token-dispatcher-type alltoall --moe-alltoall-overlap-comm",
    "--tensor-model-parallel-size 2 --context-parallel-size 2 --nproc 4",
)
"""What the parent checks before it forks."""
SECONDS = 300
"""Of a case, after which its error says where it stands; one takes seconds on an idle machine."""


def main() -> None:
    """Check all cases."""
    from mindspeed.type_check import check_types, require_package

    require_package()
    from spmd_types import _checker as checker

    from mindspeed import session
    from mindspeed.planner import isolated
    from mindspeed.planner.job import Job
    from mindspeed.training import (  # noqa: F401  (for all children)
        forward_step,
        model,
        preference,
        reference,
        step,
    )
    from mindspeed.type_check import rules, stage
    from mindspeed.type_check.report import as_data, describe
    from tests.type_check import faults, planted
    from tests.type_check.adjoint import name_of

    def settings(flags: str) -> Any:
        return Job(shlex.split(SMALL + flags)).settings().args

    for flags in WARM:  # children inherit modules, operators and results of FakeTensors
        stage.import_ahead(settings(flags))
        stage.check_stage(settings(flags), 0, [0])
    function_of, ran = checker._get_autograd_function_class, set()

    def recorded(call: Any) -> Any:
        function = function_of(call)
        if function is not None:
            ran.add(name_of(function))
        return function

    checker._get_autograd_function_class = recorded
    in_children = isolated.map

    def checked(flags: str, fault: str | None, without: str | None = None) -> dict[str, Any]:
        faulthandler.dump_traceback_later(SECONDS - 20, file=sys.stderr)
        args = settings(flags)
        if without is not None:
            session.install().engine.remove(f"repair:{without}")
        if fault != faults.READS.name:  # stages run here: this is a child already
            isolated.map = lambda function, arguments, jobs: (function(*one) for one in arguments)
        with faults.NAMED[fault].planted() if fault else nullcontext():
            verdict = check_types(args)
        return as_data(args, verdict) | {
            "text": describe(args, verdict),
            "ran": sorted(ran),
            "own": sorted(map(name_of, rules._own())),
        }

    planted.remember()
    cases = [tuple(case) for case in json.load(sys.stdin)]
    for found in in_children(checked, cases, jobs=2, timeout=SECONDS):
        print(json.dumps(found if isinstance(found, dict) else {"error": str(found)}), flush=True)


if __name__ == "__main__":
    main()
