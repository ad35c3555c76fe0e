"""Checks many small jobs in children of one process: ``python -m tests.type_check.check_job``.

Reads ``[[flags, fault, repair], ...]`` from standard input, prints one JSON object a line. A fault
is the name of a function of :mod:`tests.type_check.faults`, which changes Megatron or the built
model; the repair is switched off.
"""

from __future__ import annotations

import json
import shlex
import sys
from typing import Any

SMALL = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --vocab-size 128 "
    "--micro-batch-size 1 --position-embedding-type rope --normalization RMSNorm --swiglu "
    "--disable-bias-linear "
)


def main() -> None:
    """Check all cases."""
    from mindspeed.type_check import check_types, require_package

    require_package()
    from mindspeed import session
    from mindspeed.planner import isolated
    from mindspeed.planner.job import Job
    from mindspeed.training import forward_step, model, step  # noqa: F401  (for all children)
    from mindspeed.type_check import megatron, stage  # noqa: F401
    from mindspeed.type_check.report import as_data, describe
    from tests.type_check import faults

    Job(shlex.split(SMALL)).settings()  # what it imports
    megatron.rules()

    def checked(flags: str, fault: str | None, without: str | None = None) -> dict[str, Any]:
        args = Job(shlex.split(SMALL + flags)).settings().args
        if without is not None:
            session.install().engine.remove(f"repair:{without}")
        if fault is not None:
            getattr(faults, fault)()
        verdict = check_types(args)
        return as_data(args, verdict) | {"text": describe(args, verdict)}

    for found in isolated.map(checked, [tuple(case) for case in json.load(sys.stdin)], jobs=2):
        print(json.dumps(found if isinstance(found, dict) else {"error": str(found)}), flush=True)


if __name__ == "__main__":
    main()
