"""Checkpoints of a model with no-op layers are those of the model without them, both ways."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

import pytest

from mindspeed.checkpoint.architecture import check_architecture, take_architecture
from mindspeed.errors import CheckpointError, ConfigError
from tests.support.megatron_lm_reference import assert_losses
from tests.support.trainer_job import SETUP, metrics, train, whole_mock_data

TP2 = ["--tensor-model-parallel-size", "2"]
NOOP = ["--num-layers", "6", "--noop-layers", "0,5", "--pipeline-model-parallel-size", "2"]
OPTIMIZERS = {
    "plain": [],
    "distributed": ["--use-distributed-optimizer", "--dist-ckpt-optim-fully-reshardable"],
}


def losses(ranks, file: Path, flags: list[str]) -> list[float]:
    flags = [*flags, "--metrics-file", str(file)]
    results = ranks(2, train, flags, whole_mock_data, setup=SETUP, backend=None, timeout=300)
    assert {result["error"] for result in results} == {None}, results[0]["error"]
    return [record["lm_loss"] for record in metrics(file)]


@pytest.mark.weekly_cases("plain")
@pytest.mark.slow
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_run_continues_with_noop_layers_and_again_without(optimizer, ranks, tmp_path):
    """Iterations 4 to 6 lose what they lose without any interruption (test_resume)."""
    one, two, flags = tmp_path / "one", tmp_path / "two", OPTIMIZERS[optimizer]
    begin = [*TP2, *flags, "--save", str(one), "--exit-interval", "3"]
    losses(ranks, tmp_path / "1.jsonl", begin)
    go_on = [*NOOP, *flags, "--load", str(one), "--save", str(two), "--exit-interval", "5"]
    assert_losses(losses(ranks, tmp_path / "2.jsonl", go_on), "tensor-2", first=4)
    end = [*TP2, *flags, "--load", str(two), "--use-checkpoint-args"]
    assert_losses(losses(ranks, tmp_path / "3.jsonl", end), "tensor-2", first=6)


MOE = {"num_experts": 4, "moe_layer_freq": [0, 1, 0, 1]}


def test_the_architecture_of_a_checkpoint_is_that_of_the_layers_that_compute():
    def model(**values):
        return Namespace(group_query_attention=False, **values)

    saved = model(num_layers=4, noop_layers=["0,3"], **MOE)
    check_architecture(model(num_layers=2, **MOE), saved, "c")
    check_architecture(
        model(num_layers=3, noop_layers=(1,), num_experts=4, moe_layer_freq=[1, 0, 0]), saved, "c"
    )
    with pytest.raises(CheckpointError, match="--num-layers: 2 in the checkpoint, now 4"):
        check_architecture(model(num_layers=4, **MOE), saved, "c")


@pytest.mark.parametrize(
    ("noop_layers", "num_layers", "frequency"),
    [((), 2, [1, 0]), (["1"], 3, [1, 0, 0]), (["0,3"], 4, [0, 1, 0, 0])],
)
def test_the_architecture_of_a_checkpoint_fits_the_noop_layers_of_the_run(
    noop_layers, num_layers, frequency
):
    saved = Namespace(num_layers=4, noop_layers=["0,3"], tokenizer_type="NullTokenizer", **MOE)
    args = Namespace(num_layers=1, noop_layers=noop_layers, moe_layer_freq=1, num_experts=None)
    take_architecture(args, saved)
    assert (args.num_layers, args.moe_layer_freq) == (num_layers, frequency)


def test_given_flags_stay_or_contradict():
    def run(**values):
        return Namespace(**{"num_layers": 4, "noop_layers": ["0,3"], "seq_length": 8, **values})

    saved = Namespace(
        num_layers=2, seq_length=16, moe_layer_freq=2, num_experts=4, tokenizer_type="x"
    )
    args = run(moe_layer_freq=1, num_experts=None, tokenizer_type=None)
    take_architecture(args, saved, {"num_layers", "seq_length"})
    assert (args.num_layers, args.seq_length, args.num_experts) == (4, 8, 4)
    assert args.tokenizer_type == "x"
    with pytest.raises(ConfigError, match="--num-experts 8 contradicts the checkpoint"):
        take_architecture(run(num_experts=8), saved, {"num_experts"})
    with pytest.raises(ConfigError, match="--moe-layer-freq 1 contradicts the checkpoint"):
        take_architecture(run(moe_layer_freq=1, noop_layers=()), saved, {"moe_layer_freq"})
    same = run(moe_layer_freq=[1, 0], noop_layers=())
    take_architecture(same, saved, {"moe_layer_freq"})
