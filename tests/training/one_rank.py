"""The run of one rank that every layout is compared with."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from mindspeed.testing import RankError
from tests.support.trainer_job import SETUP, metrics
from tests.training.matrix_job import train

# States of Adam count from the second update on, which the third step sees; only where ranks share
# them can they be wrong if gradients and weights are right.
THREE_STEPS = ("optimizer", "zero-stage", "fsdp", "interval")


class Records(list[dict]):
    """What a run has logged, and how to record it again.

    Args:
        records: of its iterations.
        flags: of the run.
        record: trains again with other flags, and these in addition.
        folder: for recordings.
    """

    def __init__(
        self,
        records: list[dict],
        flags: list[str],
        record: Callable[[list[str]], None],
        folder: Path,
    ) -> None:
        super().__init__(records)
        self.flags, self.record, self.folder = flags, record, folder


class OneRank:
    """The initial weights of a model, saved by one rank, and that rank's losses from there."""

    def __init__(self, ranks, directory: Path, model: str) -> None:
        self.ranks = ranks
        self.directory = directory
        self.model = model.split()
        self._plain: dict[tuple[int, str], list[dict]] = {}
        save = ["--save", str(directory / "weights"), "--lr", "0", "--train-iters", "1"]
        # Weights of another seed than that of the runs, which show thus that they load them.
        self._run(1, [*save, "--micro-batch-size", "4", "--seed", "7"])
        self.records = self._train(1, [])

    def train(self, world_size: int, flags: str, env: dict[str, str] | None = None) -> list[dict]:
        """The first two of three iterations from the saved weights; all with sharded states."""
        two = [] if any(word in flags for word in THREE_STEPS) else ["--exit-interval", "2"]
        return self._train(world_size, [*two, *flags.split()], env)

    def _train(
        self, world_size: int, flags: list[str], env: dict[str, str] | None = None
    ) -> list[dict]:
        file = self.directory / "metrics.jsonl"
        file.unlink(missing_ok=True)
        load = ["--load", str(self.directory / "weights"), "--finetune", "--no-load-optim"]
        record = ["--no-load-rng", "--metrics-file", str(file)]
        self._run(world_size, [*load, *record, *flags], env)

        def again(more: list[str]) -> None:
            self._run(world_size, [*load, "--no-load-rng", *flags, *more], env)

        return Records(metrics(file), flags, again, self.directory)

    def plain(self, world_size: int, flags: str, env: dict[str, str] | None = None) -> list[dict]:
        """The same of a run that several tests compare with: made at the first call."""
        key = world_size, flags
        if key not in self._plain:
            self._plain[key] = self.train(world_size, flags, env)
        return self._plain[key]

    def resumed(self, sizes: tuple[int, int], flags: tuple[str, str]) -> list[dict]:
        """Two iterations with one layout, saved, and the third with another."""
        file, folder = self.directory / "metrics.jsonl", self.directory / "resumed"
        start = ["--load", str(self.directory / "weights"), "--finetune", "--no-load-optim"]
        save = ["--no-load-rng", "--save", str(folder), "--exit-interval", "2", *flags[0].split()]
        self._run(sizes[0], [*start, *save])
        file.unlink(missing_ok=True)
        load = ["--load", str(folder), "--no-load-rng", "--metrics-file", str(file)]
        self._run(sizes[1], [*load, *flags[1].split()])
        return metrics(file)

    def _run(self, world_size: int, flags: list[str], env: dict[str, str] | None = None) -> None:
        options = {"setup": SETUP, "backend": None, "timeout": 240, "env": env}
        self.ranks(world_size, train, [*self.model, *flags], **options)


def made_once(ranks, folders: pytest.TempPathFactory) -> Callable[[str], OneRank]:
    """``get(model)``: the run of a model, made at its first use."""
    made: dict[str, OneRank] = {}

    def get(model: str) -> OneRank:
        if model not in made:
            made[model] = OneRank(ranks, folders.mktemp("one_rank"), model)
        return made[model]

    return get


def column(records: list[dict], name: str) -> list[float]:
    return [record[name] for record in records]


def assert_same_training(
    records: list[dict], expected: list[dict], *, loss: float = 1e-6, norm: float = 1e-4
) -> None:
    """All losses and gradient norms of all steps are equal within relative tolerances."""
    assert len(records) >= min(2, len(expected)) > 0, "steps are missing"
    losses = [(name, loss) for name in records[0] if name.endswith("_loss")]
    for name, tolerance in (*losses, ("grad_norm", norm)):
        found, wanted = column(records, name), column(expected[: len(records)], name)
        if found != pytest.approx(wanted, rel=tolerance):
            where = first_difference(records, expected)
            raise AssertionError(f"{name}: {found}, not {wanted}\n{where}")


def first_difference(records: list[dict], expected: list[dict]) -> str:
    """The first tensor that differs in two runs, of which both are recorded again."""
    from mindspeed.compare import page
    from mindspeed.compare.recording import read
    from mindspeed.compare.walk import compare

    if not isinstance(records, Records) or not isinstance(expected, Records):
        return "(no runs that can be recorded again)"
    folder = records.folder / f"compared-{len(list(records.folder.glob('compared-*')))}"
    # With the same micro-batches, so that activations can be compared, too.
    sizes = re.findall(r"--micro-batch-size \d+", " ".join(records.flags))
    same = " ".join(sizes[-1:]).split()
    noise = [folder / f"noise-{n}" for n in (1, 2, 3)]
    try:
        records.record(["--record", str(folder / "b"), "--record-steps", "0,1"])
        expected.record([*same, "--record", str(folder / "a"), "--record-steps", "0,1"])
        for n, path in enumerate(noise, 1):
            more = ["--record", str(path), "--record-steps", "0,1", "--record-noise", str(n)]
            expected.record([*same, *more])
    except RankError as error:
        return f"(cannot be recorded: {error})"
    a, b = read(folder / "a"), read(folder / "b")
    return "\n".join(page.lines(compare(a, b, [read(path) for path in noise]), a, b))
