"""The verdict in words: what is proven, or which line uses what wrongly and what follows."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping
from dataclasses import asdict
from fnmatch import fnmatchcase
from typing import Any

from mindspeed.adaptor.upstream import UpstreamReport, load_reports
from mindspeed.job import MixtureOfExperts, Parallel
from mindspeed.spmd import I, P, R, Type, V
from mindspeed.type_check import Verdict
from mindspeed.type_check.chunk import WrongUse

PROVEN = "every gradient is summed over exactly the ranks that hold a part of it"
OUTSIDE = (
    "not looked at: values (factors, counts, seeds), the optimizer, checkpoints, the order of a "
    "pipeline; data-parallel ranks are taken to sum their gradients"
)
MEANING: Mapping[Type, str] = {
    R: "the same on all ranks, whose gradients are parts of a sum",
    I: "the same on all ranks, and so is its gradient",
    V: "a different part on each rank",
    P: "a term of a sum on each rank",
}
_CONSEQUENCE: Mapping[tuple[Type, Type], str] = {
    (I, R): "each rank computes a part of its gradient, and nothing sums the parts",
    (I, V): "every rank has the whole already; it would be counted once for each rank",
    (I, P): "it is summed already; another reduction multiplies it by the number of ranks",
    (R, I): "its gradients on the ranks are parts of a sum, but one is taken for the whole",
    (R, V): "every rank has the same, where each should have its own part",
    (R, P): "it is no term of a sum; the reduction multiplies it by the number of ranks",
    (V, I): "ranks have different parts where all need the whole: a reduction is missing",
    (V, R): "ranks have different parts where all need the same: a gather is missing",
    (V, P): "parts are no terms of a sum: they would be added to each other",
    (P, I): "terms of a sum are used as if they were summed: a reduction is missing",
    (P, R): "terms of a sum are used as if they were summed: a reduction is missing",
    (P, V): "terms of a sum are used as if they were summed: a reduction is missing",
}


def describe(args: argparse.Namespace, verdict: Verdict) -> str:
    """The text of the command."""
    parallel = Parallel.of(args)
    sizes = {
        "tensor": parallel.tensor,
        "sequence parallel": "yes" if parallel.sequence > 1 else "no",
        "context": parallel.context,
        "data": parallel.data,
        "pipeline": parallel.pipeline,
    }
    if MixtureOfExperts.of(args).count:
        sizes |= {"expert": parallel.expert, "expert tensor": parallel.expert_tensor}
    shown = ", ".join(f"{name} {size}" for name, size in sizes.items() if size not in (1, "no"))
    lines = [f"{parallel.world} ranks: {shown or 'nothing is shared'}"]
    lines += [
        f"  stage {stage} ran on short samples of zeros, as FakeTensors do not do: {reason}"
        for stage, reason in verdict.with_values.items()
    ]
    if verdict.wrong is not None:
        return "\n".join([*lines, *_wrong(args, verdict.wrong)])
    counts = verdict.parameters
    lines += [
        f"  {counts[kind]:5d} parameters: {MEANING[kind]}" for kind in (V, R, I) if counts[kind]
    ]
    if len(verdict.stages) < parallel.pipeline:
        ran = ", ".join(map(str, verdict.stages))
        lines.append(
            f"  stages {ran} of {parallel.pipeline}: the others are made of the same chunks"
        )
    lines += [f"accepted: {PROVEN}", OUTSIDE]
    return "\n".join(lines)


def _wrong(args: argparse.Namespace, wrong: WrongUse) -> list[str]:
    place = f"{_short(wrong.file)}:{wrong.line} in {wrong.function}"
    lines = [f"REFUSED: stage {wrong.stage}, {place}"]
    if wrong.parameters:
        lines.append(f"  parameters   {', '.join(wrong.parameters)}")
    if wrong.found is None:
        name, no_rule, _ = wrong.detail.partition(_NO_RULE)
        if no_rule:
            lines.append(f"  what         {name} is an autograd function without a rule")
            return [*lines, *_A_RULE]
        lines.append("  " + wrong.detail.partition("\n\nSet SPMD_TYPES")[0].replace("\n", "\n  "))
        return lines
    needed = " or ".join(one.name for one in wrong.needed)
    lines += [
        f"  what         {wrong.what}",
        f"  ranks        {wrong.axis} parallel",
        f"  it is        {wrong.found.name}: {MEANING[wrong.found]}",
        f"  it must be   {needed}: {MEANING[wrong.needed[0]]}",
        f"  consequence  {consequence(args, wrong)}",
    ]
    for one in known(wrong):
        lines += [f"  known        {one.report}: {one.wrong}", f"  repaired by  {one.by}, here"]
    return lines


_NO_RULE = ".apply: autograd Function is not registered"
_A_RULE = (
    "  its rule     from mindspeed.spmd import Local, typed",
    "",
    "               @typed(Local())  # each rank by itself; others: docs/types.md",
    "               class ...",
)


def consequence(args: argparse.Namespace, wrong: WrongUse) -> str:
    """What the ranks do wrongly, in words.

    Args:
        args: final values.
        wrong: with a type that was found.
    """
    assert wrong.found is not None
    kind = wrong.found, wrong.needed[0]
    if wrong.parameters and kind == (I, R):
        return f"each rank keeps the gradient of its own {_share(args, wrong)}; nothing sums them"
    if wrong.parameters and kind == (R, I):
        return "every rank has the whole gradient, and the sum counts it once for each rank"
    return _CONSEQUENCE[kind]


def _share(args: argparse.Namespace, wrong: WrongUse) -> str:
    """What the ranks divide among them where a parameter is used."""
    if any(part in name for name in wrong.parameters for part in _OF_HEADS):
        return "heads"
    if wrong.axis != "tensor" or Parallel.of(args).sequence > 1:
        return "tokens"
    return "part of the layer"


_OF_HEADS = ("q_layernorm", "k_layernorm", "softmax_offset", "out_norm")


def known(wrong: WrongUse) -> list[UpstreamReport]:
    """Public reports of the wrong use, of the ledger of upstream's defects."""
    uses = [f"{wrong.function} {name}" for name in wrong.parameters or ("",)]
    return [
        one
        for one in load_reports()
        if one.refusal and any(fnmatchcase(use, one.refusal) for use in uses)
    ]


def _short(path: str) -> str:
    """The path from the package on."""
    for package in ("megatron", "mindspeed"):
        _, found, rest = path.rpartition(f"{os.sep}{package}{os.sep}")
        if found:
            return f"{package}{os.sep}{rest}"
    return path


def as_data(args: argparse.Namespace, verdict: Verdict) -> dict[str, Any]:
    """Everything as plain data."""
    wrong = None
    if verdict.wrong is not None:
        wrong = asdict(verdict.wrong)
        wrong["found"] = verdict.wrong.found and verdict.wrong.found.name
        wrong["needed"] = [one.name for one in verdict.wrong.needed]
        if verdict.wrong.found is not None:
            wrong["consequence"] = consequence(args, verdict.wrong)
        wrong["known"] = [asdict(one) for one in known(verdict.wrong)]
    return {
        "accepted": verdict.wrong is None,
        "ranks": Parallel.of(args).world,
        "parameters": {kind.name: verdict.parameters[kind] for kind in Type},
        "stages": list(verdict.stages),
        "with_values": dict(verdict.with_values),
        "wrong": wrong,
    }
