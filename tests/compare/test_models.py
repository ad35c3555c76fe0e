"""Recorded runs of every model family align in other layouts: nothing is left out, all is equal."""

from __future__ import annotations

import os
from typing import Any

import pytest

from tests.support.lazy import needs

needs("megatron.core", "transformers")

from mindspeed.compare.recording import Recording, read
from mindspeed.compare.walk import compare
from tests.support.tiny import CASES, LENGTH, VOCAB

JOB = (
    f"--seq-length={LENGTH}", "--micro-batch-size=2", "--global-batch-size=4", "--mock-data",
    "--tokenizer-type=NullTokenizer", f"--vocab-size={VOCAB}", "--train-iters=1", "--lr=1e-3",
    "--lr-decay-style=constant", "--finetune", "--no-mask-padded-vocab",
    "--make-vocab-size-divisible-by=64", "--hidden-dropout=0", "--attention-dropout=0",
)  # fmt: skip
TP = ("--tensor-model-parallel-size=2",)
SP = (*TP, "--sequence-parallel")
PP = ("--pipeline-model-parallel-size=2",)
EP = ("--expert-model-parallel-size=2", "--moe-grouped-gemm")
LAYOUTS = {"tensor": SP, "stages": PP}
NOISE = (1, 2, 3)
DAILY = ("qwen3-next-tensor", "deepseek-v3-stages", "gpt-oss-tensor")
WEEKLY = [one for name in CASES for way in LAYOUTS if (one := f"{name}-{way}") not in DAILY]


def train(flags: list[str]) -> None:
    """Train on this rank."""
    from mindspeed.cli.pretrain import _prepare
    from mindspeed.training.pretrain import pretrain

    pretrain(_prepare(flags, int(os.environ["WORLD_SIZE"])))


@pytest.fixture(scope="module")
def trusted(tmp_path_factory, rank_pool):
    """``trusted(case)``: flags of a job, a recording of one rank, and three with noise."""
    known: dict[str, tuple[list[str], Recording, list[Recording]]] = {}

    def get(name: str) -> tuple[list[str], Recording, list[Recording]]:
        if name not in known:
            folder = tmp_path_factory.mktemp(name)
            CASES[name].save(CASES[name].model(), folder)
            flags = [f"--load=hf:{folder}", *JOB, *CASES[name].flags]
            run(rank_pool, 1, [*flags, f"--record={folder}/a"])
            for number in NOISE:
                noise = [f"--record={folder}/noise-{number}", f"--record-noise={number}"]
                run(rank_pool, 1, [*flags, *noise])
            runs = [read(folder / f"noise-{number}") for number in NOISE]
            known[name] = flags, read(folder / "a"), runs
        return known[name]

    return get


def run(pool: Any, ranks: int, flags: list[str]) -> None:
    pool.run(ranks, train, flags, setup="tests.support.warm", backend=None, timeout=120)


@pytest.mark.slow
@pytest.mark.weekly_cases(*WEEKLY)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", CASES)
def test_a_family_is_recorded_whole_in_every_layout(trusted, rank_pool, tmp_path, name, layout):
    flags, a, noise = trusted(name)
    run(rank_pool, 2, [*flags, *LAYOUTS[layout], f"--record={tmp_path}/b"])
    b = read(tmp_path / "b")
    result = compare(a, b, noise)
    assert result.equal, (result.first, result.before)
    assert not result.only and not result.before
    assert not a.skipped and not b.skipped
    assert len(result.rows) == sum(name.what != "gaps" for name in a.tensors)
