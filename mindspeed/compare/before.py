"""What makes two runs differ before any tensor does: other models, data, seeds, sizes or steps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from mindspeed.compare.names import Name
from mindspeed.compare.recording import Recorded, Recording

_OF_NO_ACCOUNT = (
    *("rank", "local_rank", "world_size", "data_parallel_size", "command_words", "load", "save"),
    *("metrics_file", "transformer_pipeline_model_parallel_size", "config", "global_rank"),
)
"""Arguments that name files, or that follow from the layout."""

_OF_VOCABULARY = ("embedding.word_embeddings", "output_layer")


def arguments(a: Recording, b: Recording) -> dict[str, tuple[Any, Any]]:
    """Arguments that both jobs have with other values."""
    here, there = a.job, b.job
    return {
        name: (here[name], there[name])
        for name in sorted(here.keys() & there.keys())
        if here[name] != there[name]
        and name not in _OF_NO_ACCOUNT
        and not name.startswith("record")
    }


def problems(a: Recording, b: Recording) -> Iterator[str]:
    """Why the runs cannot be equal, or are not whole, a sentence each."""
    for whose, run in (("A", a), ("B", b)):
        for step, ranks in run.missing.items():
            some = ", ".join(map(str, ranks[:4])) + (" ..." if len(ranks) > 4 else "")
            yield f"{whose}'s step {step} was cut off: nothing of rank {some}"
    if lost := sorted(set(a.steps) - set(b.steps)):
        yield f"B has not recorded step {', '.join(map(str, lost))}"
    seeds = a.job.get("seed"), b.job.get("seed")
    if seeds[0] != seeds[1]:
        yield f"the seeds differ, {seeds[0]} in A and {seeds[1]} in B: other weights and other data"
    for step in a.steps:
        here, there = _tokens(a, step), _tokens(b, step)
        if here and there and here != there:
            yield (
                f"the batch sizes differ: step {step} has {here:,} tokens in A and {there:,} in B"
            )
    if sizes_differ(a, b) and (a.job.get("moe_aux_loss_coeff") or b.job.get("moe_aux_loss_coeff")):
        yield (
            "moe_aux_loss_coeff: losses that balance experts are of a micro-batch, and theirs "
            "differ: so do the gradients of the routers"
        )
    yield from _dropout(a, b)


def sizes_differ(a: Recording, b: Recording) -> bool:
    """Whether the micro-batches of two jobs have other numbers of samples."""
    return a.job.get("micro_batch_size") != b.job.get("micro_batch_size")


def grouping(a: Recording, b: Recording) -> str:
    """How the micro-batches of two runs differ in size; empty if they do not."""
    rows = [Counter(t.shape[0] for n, t in r.tensors.items() if n.module == "data") for r in (a, b)]
    if not all(rows) or rows[0].keys() == rows[1].keys():
        return ""
    here, there = (next(iter(one)) for one in rows)
    return (
        f"other grouping: micro-batches of {here} tokens in A and {there} in B; only weights, "
        "their gradients and the loss are compared (record both with --record-by-sample for all)"
    )


def other_model(a: Recording, b: Recording) -> tuple[Name, str] | None:
    """The first weight that one run has not, or in another size, and a sentence about it."""
    step = min(set(a.steps) & set(b.steps))
    here, there = _weights(a, step), _weights(b, step)
    if not here or not there:
        return None
    for name, shape in here.items():
        if name in there and there[name] != shape:
            sizes = (" x ".join(map(str, one)) for one in (shape, there[name]))
            text = "the models differ: {} is {} in A and {} in B".format(name.module, *sizes)
            if name.module in _OF_VOCABULARY and a.sizes != b.sizes:
                text += (
                    "; tensor-parallel ranks pad the vocabulary: give both a "
                    "--make-vocab-size-divisible-by that makes it equal"
                )
            return name, text
    if a.missing or b.missing:  # of a rank that was killed
        return None
    for whose, other, own, more in (("A", "B", here, there), ("B", "A", there, here)):
        if lost := [name for name in own if name not in more]:
            text = (
                f"{whose} has {len(lost)} weights that {other} has not, the first {lost[0].module}"
            )
            return lost[0], f"the models differ: {text}"
    return None


def lost_pass(a: Recording, b: Recording) -> tuple[Name, str] | None:
    """The first tensor of a pass of which only one run has recorded anything, and a sentence."""
    if a.missing or b.missing:
        return None
    for whose, other, own, more in (("A", "B", a, b), ("B", "A", b, a)):
        there = {(name.step, name.when) for name in more.tensors}
        lost = (
            name
            for name in own.tensors
            if name.when in ("forward", "backward")
            and name.step in more.steps
            and (name.step, name.when) not in there
        )
        if _records_alike(own, more) and (name := next(lost, None)) is not None:
            return name, (
                f"{other} has recorded nothing of the {name.when} of step {name.step}, of which "
                f"{whose} has {name.module} and more: its recording failed"
            )
    return None


def _records_alike(a: Recording, b: Recording) -> bool:
    """Whether both jobs were asked for the same tensors."""
    names = ("record_what", "record_micro_batches")
    return all(a.job.get(name) == b.job.get(name) for name in names)


def _weights(run: Recording, step: int) -> Mapping[Name, tuple[int, int]]:
    return {
        name: tensor.shape
        for name, tensor in run.tensors.items()
        if name.when == "begin" and name.step == step
    }


def _tokens(run: Recording, step: int) -> int:
    """Tokens of a step, of the micro-batches that were recorded."""
    data: dict[Name, Recorded] = {
        name: tensor for name, tensor in run.tensors.items() if name[3:] == ("data", "tokens")
    }
    return sum(tensor.shape[0] for name, tensor in data.items() if name.step == step)


def _dropout(a: Recording, b: Recording) -> Iterator[str]:
    """Dropout whose masks differ: in other layouts, or drawn from other random states."""
    rates = [
        name
        for name in ("hidden_dropout", "attention_dropout")
        if a.job.get(name) or b.job.get(name)
    ]
    if not rates:
        return
    if a.sizes != b.sizes:
        yield (
            f"{' and '.join(rates)}: other layouts draw other masks; set it to 0, or record B with "
            "--record-forced"
        )
    elif found := next(_other_states(a, b), None):
        step, rank, names = found
        yield (
            f"{' and '.join(rates)}: the random states differ at the beginning of step {step}, on "
            f"rank {rank}: {', '.join(names)}; another seed, or more draws before it"
        )


def _other_states(a: Recording, b: Recording) -> Iterator[tuple[int, int, list[str]]]:
    """Step, rank and names of random states that differ between runs of one layout."""
    for step in sorted(a.random.keys() & b.random.keys()):
        for rank, states in a.random[step].items():
            others = b.random[step].get(rank, {})
            if names := [name for name, one in states.items() if others.get(name, one) != one]:
                yield step, rank, names
