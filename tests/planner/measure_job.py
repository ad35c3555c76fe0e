"""``mindspeed plan --measure`` on an invented plan of a tiny job on two ranks of this machine.

``python -m tests.planner.measure_job KIND DIRECTORY FLAGS`` prints what the command prints.
"""

from __future__ import annotations

import sys
from dataclasses import replace

from mindspeed.cli.main import main as command
from mindspeed.planner.layout import Layout
from mindspeed.planner.search.result import Candidate
from tests.cli.plan_search_job import FOUND, GIB, Priced, invented


def main(kind: str, directory: str, *flags: str) -> int:
    candidates = tuple(
        Candidate(
            Layout(2, 4, tp=tp, mbs=mbs),
            Priced(seconds, GIB, exposed={"data parallel": 0.1 * seconds}),
            ("--tensor-model-parallel-size", str(tp)),
        )
        for tp, mbs, seconds in ((1, 1, 1.0), (1, 3, 1.2), (1, 2, 50.0))
    )
    found = replace(FOUND, cluster="generic", candidates=candidates, front=candidates[:1])
    module, _ = invented(found)
    sys.modules["mindspeed.planner.search.plan"] = module
    words = ["--cluster", "generic", "--devices", "2", "--measure", kind, "--out", directory]
    return command(["plan", *words, "--", *flags])


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
