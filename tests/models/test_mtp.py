"""Multi-token prediction of DeepSeek-V3: logits, losses, gradients, and every format of files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tests.support.lazy import Lazy, needs

needs("megatron.core", "transformers")

from safetensors.torch import load_file

from mindspeed.errors import CheckpointError
from mindspeed.models.parallel_sizes import ParallelSizes
from tests.models import model_ranks
from tests.models.test_families import TOLERANCE, assembled
from tests.support.tiny import VOCAB

Target = Lazy("mindspeed.checkpoint.weights.convert", "Target")
convert = Lazy("mindspeed.checkpoint.weights.convert", "convert")
open_weights = Lazy("mindspeed.checkpoint.weights.convert", "open_weights")
verify = Lazy("mindspeed.checkpoint.weights.convert", "verify")
mtp_oracle = Lazy("tests.models.mtp_oracle")


SETUP = "tests.support.warm"
MTP = ("--mtp-num-layers=1", "--mtp-loss-scaling-factor=0.3")
TP_SP = ("--tensor-model-parallel-size=2", "--sequence-parallel")
PP = ("--pipeline-model-parallel-size=2", "--decoder-first-pipeline-num-layers=1")
EP = ("--expert-model-parallel-size=2",)
LOCAL = ("--transformer-impl=local",)


@pytest.fixture(scope="module")
def oracle(tmp_path_factory):
    """Directory of the tiny model, and what the formulas give."""
    assert MTP[1].endswith(f"={mtp_oracle.FACTOR}")
    folder, model = tmp_path_factory.mktemp("deepseek"), mtp_oracle.CASE.model()
    mtp_oracle.CASE.save(model, folder)
    return str(folder), mtp_oracle.CASE.truth(model, tmp_path_factory.mktemp("gradients"))


def files(folder):
    return {k: v for file in Path(folder).glob("*.safetensors") for k, v in load_file(file).items()}


def same(ours, theirs):
    assert set(ours) == set(theirs)
    for name, tensor in theirs.items():
        assert ours[name].dtype == tensor.dtype and torch.equal(ours[name], tensor), name


@pytest.mark.parametrize(
    "size, flags",
    [
        pytest.param(1, (), id="one-rank"),
        pytest.param(1, LOCAL, id="local", marks=pytest.mark.slow),
        pytest.param(2, TP_SP, id="tp-sp", marks=pytest.mark.slow),
        pytest.param(2, PP, id="pp"),
        pytest.param(2, (*EP, "--moe-grouped-gemm"), id="ep-grouped", marks=pytest.mark.slow),
        pytest.param(2, (*LOCAL, *TP_SP), id="local-tp-sp", marks=pytest.mark.slow),
    ],
)
def test_both_losses_and_all_gradients_equal_the_formulas(oracle, ranks, size, flags):
    folder, truth = oracle
    flags = (*MTP, *flags)
    run = model_ranks.loss_and_gradients
    results = ranks(size, run, folder, flags, setup=SETUP, timeout=120)
    for name in ("loss", "mtp loss"):
        found = [result[name] for result in results if result[name] is not None]
        assert found
        for loss in found:
            torch.testing.assert_close(loss, truth[name], **TOLERANCE)
    for name in ("logits", "mtp logits"):
        parts = dict(result[name] for result in results if result[name] is not None)
        logits = torch.cat([parts[rank] for rank in sorted(parts)], -1)[..., :VOCAB]
        logits = logits[:, : truth[name].shape[1]]
        torch.testing.assert_close(logits, truth[name], **TOLERANCE)
    ours, theirs = assembled(folder, results, MTP), truth["gradients"]
    names = {name for name in theirs if not name.endswith("e_score_correction_bias")}
    assert names <= set(ours)
    for name in names:
        where = lambda message, name=name: f"{name}: {message}"  # noqa: E731
        torch.testing.assert_close(ours[name], theirs[name], msg=where, **TOLERANCE)
        assert theirs[name].abs().max() > 0, name


def test_round_trip_through_all_formats_is_byte_identical(oracle, tmp_path):
    """Hugging Face -> torch_dist -> legacy TP2 PP2 local -> safetensors -> legacy EP2 -> DeepSpeed
    -> Hugging Face."""
    targets = (
        Target("torch_dist", vocab_multiple=64),
        Target("torch", ParallelSizes(tensor=2, pipeline=2), transformer_impl="local"),
        Target("safetensors"),
        Target(
            "torch", ParallelSizes(expert=2), transformer_impl="transformer_engine", grouped=True
        ),
        Target("deepspeed", ParallelSizes(tensor=2)),
        Target("hf"),
    )
    source = open_weights(oracle[0], mtp_num_layers=1)
    for number, target in enumerate(targets):
        output = tmp_path / str(number)
        written = convert(source, output, target)
        assert verify(written, output) == len(written.table)
        source = open_weights(output, mtp_num_layers=1)
        assert source.unused == []
    same(files(output), files(oracle[0]))
    assert json.loads((output / "config.json").read_text())["num_nextn_predict_layers"] == 1


@pytest.mark.parametrize(
    ("size", "layout", "flags"),
    [
        pytest.param(2, ParallelSizes(pipeline=2), PP, id="pp"),
        pytest.param(
            2, ParallelSizes(tensor=2), (*TP_SP, *LOCAL), id="local-tp", marks=pytest.mark.slow
        ),
    ],
)
def test_rank_files_are_megatrons_own_state_dicts(oracle, ranks, tmp_path, size, layout, flags):
    from tests.checkpoint import hf_ranks

    local = "local" if LOCAL[0] in flags else None
    target = Target("torch", layout, vocab_multiple=64, transformer_impl=local)
    convert(open_weights(oracle[0], mtp_num_layers=1), tmp_path, target)
    run = hf_ranks.state_dicts
    states = ranks(size, run, oracle[0], (*MTP, *flags), setup=SETUP, timeout=120)
    for where, (chunk,) in states:
        path = tmp_path / "release" / where / "model_optim_rng.pt"
        same(torch.load(path, weights_only=True)["model"], chunk)


@pytest.mark.slow
def test_a_converted_checkpoint_is_the_model_in_other_layouts(oracle, ranks, tmp_path):
    from tests.checkpoint import hf_ranks

    source = open_weights(oracle[0], mtp_num_layers=1)
    for form, layout in (("torch_dist", ParallelSizes()), ("torch", ParallelSizes(tensor=2))):
        convert(source, tmp_path / form, Target(form, layout, vocab_multiple=64))
    flags = (*MTP, *PP)
    expected, *others = (
        ranks(2, hf_ranks.weights, oracle[0], load, flags, setup=SETUP, timeout=120)
        for load in (f"hf:{oracle[0]}", str(tmp_path / "torch_dist"), str(tmp_path / "torch"))
    )
    assert any(name.startswith("mtp.") for name, _, _ in expected[1])
    for found in others:
        for ours, theirs in zip(found, expected, strict=True):
            for (name, start, tensor), (name_, start_, tensor_) in zip(ours, theirs, strict=True):
                assert (name, start) == (name_, start_) and torch.equal(tensor, tensor_), name


def test_mtp_layers_are_left_out_without_the_flag(oracle, tmp_path):
    source = open_weights(oracle[0])
    assert source.unused == ["model.layers.2.* (multi-token prediction)"]
    convert(source, tmp_path / "hf", Target("hf", like=oracle[0]))
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert config["num_nextn_predict_layers"] == 0
    assert not any(name.startswith("model.layers.2.") for name in files(tmp_path / "hf"))


def test_more_layers_than_there_are_and_copies_that_differ_are_refused(oracle, tmp_path):
    with pytest.raises(CheckpointError, match=r"--mtp-num-layers 2: .* has 1 layers"):
        open_weights(oracle[0], mtp_num_layers=2)
    from safetensors.torch import save_file

    for copy, name in mtp_oracle.COPIES.items():
        folder = tmp_path / name
        folder.mkdir()
        (folder / "config.json").write_text(Path(oracle[0], "config.json").read_text())
        tensors = files(oracle[0])
        tensors[copy][-1, -1] += 1
        save_file(tensors, folder / "model.safetensors")
        source = open_weights(folder, mtp_num_layers=1)
        with pytest.raises(CheckpointError, match=rf"{copy} is not equal to {name}"):
            convert(source, tmp_path / "out", Target("torch_dist"))
        assert not (tmp_path / "out").exists()
