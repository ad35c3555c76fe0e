"""``mindspeed plan --measure`` on an invented plan of a tiny job on two ranks of this machine.

``python -m tests.planner.measure_job KIND DIRECTORY FLAGS`` prints what the command prints.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from types import SimpleNamespace

import mindspeed.megatron_adaptor
from mindspeed.cli.plan_measure import measure_plan


def main(kind: str, directory: str, *flags: str) -> None:
    from mindspeed.planner.layout import Layout

    assert mindspeed.megatron_adaptor
    candidates = [
        SimpleNamespace(
            layout=Layout(2, 4, tp=tp, mbs=mbs),
            flags=("--tensor-model-parallel-size", str(tp)),
            prediction=SimpleNamespace(seconds=seconds, exposed={"data parallel": 0.1 * seconds}),
        )
        for tp, mbs, seconds in ((1, 1, 1.0), (2, 1, 1.1), (1, 3, 1.2), (1, 2, 50.0))
    ]
    plan = SimpleNamespace(devices=2, candidates=candidates)
    own = argparse.Namespace(
        cluster="generic", out=Path(directory), measure=kind, json=False, launch=None
    )
    measure_plan(own, flags, plan)  # type: ignore[arg-type]


if __name__ == "__main__":
    main(*sys.argv[1:])
