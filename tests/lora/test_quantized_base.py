"""Adapters of a base model in 4 or 8 bits: those of the dequantised model, in every layout."""

from __future__ import annotations

import pytest
import torch

from tests.support.lazy import Lazy, needs

needs("megatron.core", "peft")

from mindspeed.lora.merge import Merged
from mindspeed.storage.global_tensors import GlobalTensors
from mindspeed.te.quantized_weight import QuantizedFormat, rounded
from tests.lora import lora_ranks, oracle, quantized_ranks
from tests.lora.test_files import TRAIN, losses
from tests.lora.test_layouts import EP2, FULL, GROUPED, PP2, SP, TP2

formats = Lazy("mindspeed.checkpoint.weights.convert")
SETUP = "tests.support.warm"
SIZES = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2}
DIST = "--use-distributed-optimizer"


ADAPTERS = ("--lora-target-modules=all-linear", "--lora-r=4")


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


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("form", ["nf4", "int8", "fp8"])
def test_the_planner_knows_the_bytes_to_the_last_one(form, base, ranks):
    folder, adapter = base
    flags = [f"--lora-load={adapter}", f"--base-weights={form}", "--global-batch-size=4"]
    (real,) = ranks(1, lora_ranks.steps, str(folder), flags, setup=SETUP)
    (planned,) = ranks(1, lora_ranks.planned, str(folder), flags, 1, setup=SETUP, backend=None)
    assert real["losses"][2] < real["losses"][0]
    plain = [flags[0], flags[2]]
    (whole,) = ranks(1, lora_ranks.planned, str(folder), plain, 1, setup=SETUP, backend=None)
    (known,) = ranks(1, lora_ranks.steps, str(folder), plain, setup=SETUP)
    real["parameters"] += whole["parameters"] - known["parameters"]  # tables of positions
    assert planned == {name: real[name] for name in planned}
    rows, linear = 2 * (256 + 128 + 512 + 128), 2 * 128 * (256 + 128 + 512 + 256)
    stored = {
        "nf4": linear // 2 + linear // 64 + 4 * (linear // 64 // 256) + 4 * 8,
        "int8": linear + 4 * rows,
        "fp8": linear + 4 * (linear // 128**2),
    }
    assert whole["parameters"] - planned["parameters"] == 4 * linear - stored[form]


@pytest.mark.slow
def test_training_goes_on_exactly_and_merges_into_the_dequantised_base(
    base, rank_pool, ranks, tmp_path
):
    folder = base[0]
    names = ["--lora-target-modules", "q_proj", "o_proj", "down_proj", "--lora-r=4", *TRAIN, TP2]
    names += ["--base-weights=nf4", "--no-double-quantization", "--lora-alpha=8"]
    first, again = tmp_path / "first", tmp_path / "again"
    rank_pool.run(2, lora_ranks.train, str(folder), [*names, f"--save={first}"], setup=SETUP)
    more = [f"--save={again}", f"--lora-load={first / 'iter_0000002'}"]
    rank_pool.run(2, lora_ranks.train, str(folder), [*names, *more], setup=SETUP)
    known, found = losses(first), losses(again)
    assert found == {iteration: known[iteration] for iteration in (3, 4)}

    source = formats.open_weights(folder)
    stored = GlobalTensors(first / "iter_0000004")
    merged, table = Merged(source, first), {one.name: one for one in source.table}
    form = QuantizedFormat("nf4", double=False)
    for layer in ("self_attention.linear_proj", "mlp.linear_fc1", "mlp.linear_fc2"):
        name = f"decoder.layers.1.{layer}"
        weight = source.read(table[f"{name}.weight"])
        expected = rounded(weight, form)
        assert (expected - weight).abs().max() > 0.01
        if "fc1" not in layer:  # which has no adapter
            a, b = (stored.read(f"{name}.lora_{half}.all", ()) for half in "AB")
            expected = expected + 2 * b @ a
        found = merged.read(table[f"{name}.weight"])
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)
    assert torch.equal(
        merged.read(table["output_layer.weight"]), source.read(table["output_layer.weight"])
    )

    flags = [f"--lora-load={first}"]  # which says how the base is stored
    (attached,) = ranks(1, lora_ranks.logits, str(folder), str(first), flags, setup=SETUP)
    (inside,) = ranks(1, lora_ranks.merged_logits, str(folder), str(first), flags, setup=SETUP)
    torch.testing.assert_close(inside, attached, rtol=0, atol=2e-5)
    args = (quantized_ranks.inference_logits, str(folder), str(first))
    (found,) = ranks(1, *args, setup=SETUP)  # as the adapter was trained
    torch.testing.assert_close(found, attached, rtol=0, atol=2e-5)
    (found,) = ranks(1, *args, "none", setup=SETUP)
    assert (found - attached).abs().max() > 1e-3
    formats.convert(merged, tmp_path / "hf", formats.Target("hf", like=str(folder)))
    outside = Lazy("transformers").AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    with torch.no_grad():
        logits = outside(lora_ranks.batch()[0]).logits
    torch.testing.assert_close(logits, attached, rtol=0, atol=5e-5)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ((), "without adapters all are trained"),
        ((*ADAPTERS, "--transformer-impl=local"), "transformer_engine"),
        ((*ADAPTERS, "--zero-stage=3"), "cannot be sharded by Megatron-FSDP"),
        ((*ADAPTERS, "--lora-init=pissa"), "could change"),
        ((*ADAPTERS, TP2, SP, "--use-ascend-mc2"), "--base-weights nf4"),
        ((*ADAPTERS, TP2, SP, "--use-ascend-coc", "--coc-parallel-num=2"), "--base-weights"),
    ],
)
def test_what_reads_or_trains_such_weights_is_refused(flags, message, base, ranks):
    size = 2 if TP2 in flags else 1
    flags = ["--base-weights=nf4", *flags]
    with pytest.raises(Exception, match=message):
        ranks(1, quantized_ranks.configured, str(base[0]), flags, size, setup=SETUP, backend=None)


def test_sizes_that_blocks_do_not_divide_are_refused_by_name(ranks, tmp_path):
    folder = oracle.save_base(tmp_path / "base")  # 32 columns
    flags = ["--base-weights=nf4", "--lora-target-modules=q_proj", "--lora-r=4"]
    with pytest.raises(Exception, match=r"linear_\w+ has 32 columns.*use int8, or fewer"):
        ranks(1, lora_ranks.built, str(folder), flags, setup=SETUP)
