"""Adapters of a base model in 4 or 8 bits: those of the dequantised model, in every layout."""

from __future__ import annotations

import pytest
import torch

from tests.support.lazy import needs

needs("megatron.core", "peft")

from tests.lora import oracle, quantized_ranks
from tests.lora.test_layouts import EP2, FULL, GROUPED, PP2, SP, TP2

SETUP = "tests.support.warm"
SIZES = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2}
DIST = "--use-distributed-optimizer"


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    root = tmp_path_factory.mktemp("quantized")
    folder = oracle.save_base(root / "base", **SIZES)
    oracle.adapted(
        folder, target_modules=["q_proj", "o_proj", "up_proj", "down_proj"]
    ).save_pretrained(root / "adapter")
    return folder, root / "adapter"


@pytest.mark.quick_cases(3)
@pytest.mark.parametrize(
    "size, form, flags",
    [
        pytest.param(1, "nf4", (), id="nf4"),
        pytest.param(1, "int8", FULL, id="int8-recompute"),
        pytest.param(1, "fp8", (), id="fp8"),
        pytest.param(1, "nf4", ("--no-double-quantization", "--bf16", DIST), id="nf4-bf16"),
        pytest.param(2, "nf4", (TP2, SP), id="nf4-tp2-sp"),
        pytest.param(2, "nf4", (TP2,), id="nf4-tp2"),
        pytest.param(2, "int8", (PP2,), id="int8-pp2"),
        pytest.param(2, "nf4", (DIST, *FULL), id="nf4-dp2-distributed"),
    ],
)
def test_losses_and_gradients_are_those_of_the_dequantised_model(size, form, flags, base, ranks):
    check(ranks, size, form, flags, base)


@pytest.mark.slow
@pytest.mark.parametrize("more", [(GROUPED,), ()], ids=["grouped", "one-by-one"])
def test_experts_are_stored_in_fewer_bits(more, ranks, tmp_path):
    sizes = {"num_local_experts": 4, "num_experts_per_tok": 2, **SIZES}
    folder = oracle.save_base(tmp_path / "base", "Mixtral", **sizes)
    oracle.adapted(folder, target_modules=["q_proj", "o_proj"]).save_pretrained(
        tmp_path / "adapter"
    )
    flags = (EP2, "--moe-aux-loss-coeff=0", *more)
    check(ranks, 2, "nf4", flags, (folder, tmp_path / "adapter"))


def check(ranks, size, form, flags, base):
    folder, adapter = base
    flags = [f"--lora-load={adapter}", *flags]
    run = quantized_ranks.compared
    for found in ranks(size, run, str(folder), str(adapter), flags, form, setup=SETUP, timeout=120):
        (loss, gradients), (expected, others) = found["found"], found["expected"]
        assert (loss is None) == (expected is None)
        assert loss is None or loss == pytest.approx(expected, rel=1e-6)
        for (name, *_, grad), (other, *_, truth) in zip(gradients, others, strict=True):
            assert name == other and grad.abs().max() > 0
            close = 1e-5 * truth.abs().max().item()
            torch.testing.assert_close(grad, truth, rtol=1e-5, atol=close, msg=name)
        if form == "nf4":
            double = "--no-double-quantization" not in flags
            assert found["bits"] == pytest.approx(4.127 if double else 4.5, abs=0.02)
        elif form == "int8":
            assert 8 < found["bits"] < 8.5
        assert found["elements of gradients"] < found["trained"] + 4096
