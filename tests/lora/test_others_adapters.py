"""Adapters that peft made: trained on as it trains them, and written again for it."""

from __future__ import annotations

import pytest
import torch

from tests.support.lazy import Lazy, needs

needs("megatron.core", "peft", "transformers")

from mindspeed.lora import export, peft
from mindspeed.lora.merge import Merged
from mindspeed.models.families import FAMILIES
from mindspeed.storage.global_tensors import GlobalTensors
from tests.lora import lora_ranks, oracle
from tests.lora.test_files import TRAIN, losses, peft_base_logits, peft_logits
from tests.lora.test_layouts import LOCAL, PP2, SETUP, SP, TP2, compare
from tests.lora.test_peft_fields import (
    MERGED,
    PATTERNS,
    TIED_ADAPTERS,
    formats,
    hf,
    made,
    real_peft,
)

loraplus = Lazy("peft.optimizers")
KINDS = PATTERNS | MERGED | TIED_ADAPTERS


def described(adapter, base):
    """The adapter's files and its options for the model of ``base``."""
    files, shape = peft.read(adapter), formats.open_weights(base).shape
    return files, peft.attached_config(files, shape), shape


@pytest.mark.quick_cases(3)
@pytest.mark.parametrize(
    "size, flags, case",
    [
        *((1, (), case) for case in KINDS),
        (2, (TP2, SP), "dora-ranks"),
        (2, (TP2,), "dora"),
        (2, (TP2, SP, LOCAL), "dora"),
        (2, (TP2, SP), "dora-output-layer"),
        (2, (PP2,), "layers"),
        (2, (TP2, SP), "ranks-rslora"),
        (2, (TP2,), "embedding-ranks"),
        (2, (TP2, SP), "embedding"),
        (2, (TP2, SP, LOCAL), "embedding"),
        (2, (TP2,), "both-adapted-as-one"),
        (2, (TP2, SP), "both-adapted-as-one"),
        (2, (PP2,), "both-adapted-apart"),
        (2, (TP2, SP), "biases"),
        (2, (TP2, LOCAL), "biases-of-some"),
        (2, (TP2, SP), "whole-layers"),
        (2, (TP2, SP, LOCAL), "whole-qkv"),
        (2, (PP2,), "whole-norms"),
    ],
)
def test_gradients_of_others_adapters_equal_pefts(size, flags, case, ranks, tmp_path):
    base, adapter, model = made(tmp_path, *KINDS[case])
    _, config, _ = described(adapter, base)
    loss, gradients = oracle.truth(model)
    if config.ensure_weight_tying:
        _add_copies(gradients)
    truth = (base, adapter, loss, gradients)
    compare(ranks, size, [f"--lora-load={adapter}", *flags], truth, config, tmp_path / "out")


def _add_copies(gradients):
    """Of the output layer, which has the embedding's matrices, transposed, in peft's model."""
    ours, theirs = "model.embed_tokens.lora_embedding_{}", "lm_head.lora_{}.weight"
    for one, other in ("AB", "BA"):
        names = peft.PREFIX + ours.format(one), peft.PREFIX + theirs.format(other)
        total = gradients[names[0]] + gradients[names[1]].t()
        gradients[names[0]], gradients[names[1]] = total, total.t()


def test_ends_on_two_stages_have_no_common_adapter(ranks, tmp_path):
    base, adapter, _ = made(tmp_path, *KINDS["both-adapted-as-one"])
    with pytest.raises(Exception, match="on different pipeline stages, and have one adapter"):
        ranks(2, lora_ranks.built, str(base), [f"--lora-load={adapter}", PP2], setup=SETUP)


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("case", KINDS)
def test_others_adapters_are_written_as_they_were_read(case, tmp_path):
    base, adapter, _ = made(tmp_path, *KINDS[case])
    files, config, shape = described(adapter, base)
    tensors = peft.whole_tensors(files, shape, own_scales=True)
    export.write(tmp_path / "written", config, tensors, FAMILIES["llama"], shape, str(base))
    logits = []
    for folder in (adapter, tmp_path / "written"):
        model = hf.AutoModelForCausalLM.from_pretrained(base, attn_implementation="eager")
        with torch.no_grad():
            model = real_peft.PeftModel.from_pretrained(model, folder).eval()
            logits.append(model(lora_ranks.batch()[0]).logits)
    torch.testing.assert_close(logits[1], logits[0], rtol=0, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("init", ["pissa", "olora", "pissa_niter_8"])
def test_factors_of_the_base_are_taken_out_and_given_back(init, rank_pool, ranks, tmp_path):
    """Trained on two ranks: begins as peft does, and is the same model in peft as plain LoRA."""
    base = oracle.save_base(tmp_path / "base", num_hidden_layers=2)
    names = ["--lora-target-modules", "q_proj", "linear_fc1", "o_proj", "down_proj"]
    flags = [*names, "--lora-r=4", "--lora-alpha=8", f"--lora-init={init}", *TRAIN, TP2, SP]
    flags.append(f"--save={tmp_path / 'adapter'}")
    rank_pool.run(2, lora_ranks.train, str(base), flags, setup=SETUP, timeout=120)

    stored = GlobalTensors(tmp_path / "adapter" / "iter_0000002")
    kept = hf.AutoModelForCausalLM.from_pretrained(base, attn_implementation="eager")
    before = {name: tensor.clone() for name, tensor in kept.state_dict().items()}
    wanted = ["q_proj", "o_proj", "down_proj"]
    options = {"r": 4, "lora_alpha": 8, "target_modules": wanted, "init_lora_weights": init}
    real_peft.get_peft_model(kept, real_peft.LoraConfig(**options))
    after = {name.replace(".base_layer", ""): one for name, one in kept.state_dict().items()}
    layers = {
        "self_attn.q_proj": "self_attention.linear_qkv.lora_initial_{}.q",
        "self_attn.o_proj": "self_attention.linear_proj.lora_initial_{}.all",
        "mlp.down_proj": "mlp.linear_fc2.lora_initial_{}.all",
    }
    for theirs, ours in layers.items():
        a, b = (stored.read(f"decoder.layers.1.{ours.format(half)}", ()) for half in "AB")
        name = f"model.layers.1.{theirs}.weight"
        taken, expected = 2 * b @ a, before[name] - after[name]
        if "niter" in init:  # begins with random vectors
            taken, expected = ((before[name] - one).norm() for one in (taken, expected))
        torch.testing.assert_close(taken, expected, rtol=0, atol=2e-5 if taken.dim() else 0.05)

    expected = peft_logits(base, tmp_path / "adapter" / "peft")
    assert (expected - peft_base_logits(base)).abs().max() > 0.05
    for source in (tmp_path / "adapter", tmp_path / "adapter" / "peft"):
        found = ranks(1, lora_ranks.logits, str(base), str(source), setup=SETUP)[0]
        torch.testing.assert_close(found, expected, rtol=0, atol=5e-5)
    merged = Merged(formats.open_weights(base), tmp_path / "adapter")
    compare_merges(merged, Merged(formats.open_weights(base), tmp_path / "adapter" / "peft"))

    again = [*flags, f"--save={tmp_path / 'again'}"]
    again.append(f"--lora-load={tmp_path / 'adapter' / 'iter_0000002'}")
    rank_pool.run(2, lora_ranks.train, str(base), again, setup=SETUP, timeout=120)
    known, found = losses(tmp_path / "adapter"), losses(tmp_path / "again")
    assert found == {iteration: known[iteration] for iteration in (3, 4)}


def compare_merges(one, other):
    for parameter in one.table:
        first, second = one.read(parameter), other.read(parameter)
        torch.testing.assert_close(first, second, rtol=0, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("case", ["embedding", "biases", "whole-norms"])
def test_steps_equal_those_of_peft(case, ranks, tmp_path):
    """Three of AdamW on two ranks; what is trained of the base model, too."""
    base, adapter, model = made(tmp_path, *KINDS[case])
    trained = [one for one in model.parameters() if one.requires_grad]
    assert_steps_equal(
        ranks, base, adapter, model, torch.optim.AdamW(trained, weight_decay=0, **RATES), tmp_path
    )


RATES = {"lr": 0.003, "betas": (0.9, 0.95), "eps": 1e-8}


def assert_steps_equal(ranks, base, adapter, model, optimizer, folder, more=(), ratio=1):
    """Train peft's model and ours, and compare; B moves by ``ratio`` times the rate."""
    for _ in range(3):
        optimizer.zero_grad()
        oracle.truth(model, torch.float32)
        optimizer.step()
    model.save_pretrained(folder / "trained")
    flags = [f"--lora-load={adapter}", "--lr=0.003", "--clip-grad=0", *more]
    flags += ["--weight-decay=0", "--adam-beta2=0.95", "--lr-decay-style=constant", TP2]
    found = ranks(2, lora_ranks.adapter_after_steps, str(base), str(adapter), flags, setup=SETUP)
    trained = lora_ranks.assembled([(None, one) for one in found])
    files, _, shape = described(folder / "trained", base)
    expected = peft.whole_tensors(files, shape, own_scales=True)
    before = peft.whole_tensors(peft.read(adapter), shape, own_scales=True)
    assert trained.keys() == expected.keys()
    for name, tensor in expected.items():
        moved = (tensor - before[name]).abs().max().item()
        assert 0.5 < moved / (0.009 * (ratio if ".lora_B." in name else 1)) < 1.1
        own = trained[name][: len(tensor)]  # without padding
        torch.testing.assert_close(own, tensor, rtol=0, atol=2e-3 * moved, msg=name)


def test_lora_plus_steps_equal_those_of_pefts_optimizer(ranks, tmp_path):
    base, adapter, model = made(tmp_path, *PATTERNS["ranks"])
    optimizer = loraplus.create_loraplus_optimizer(
        model, torch.optim.AdamW, loraplus_lr_ratio=16.0, **RATES
    )
    more = ["--lora-plus-lr-ratio=16"]
    assert_steps_equal(ranks, base, adapter, model, optimizer, tmp_path, more, ratio=16)
