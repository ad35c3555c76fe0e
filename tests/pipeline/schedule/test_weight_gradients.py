"""Backward divided into I and W gives the same gradients, bit for bit, with the same work."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch

from mindspeed.instruments.flops import FlopCounter
from mindspeed.memory.stash_swap import StashSwap
from mindspeed.pipeline.schedule.weight_gradients import WeightGradients
from mindspeed.te import fp8
from mindspeed.te.grouped import GroupedLinear
from mindspeed.te.linear import LayerNormLinear, Linear
from mindspeed.te.recipes import DelayedScaling, Float8CurrentScaling
from tests.pipeline.schedule.split_ranks import Case, compare
from tests.support import gpt_ranks
from tests.support.lazy import needs

needs("megatron.core")

ROWS, BATCH, IN, OUT, MICRO_BATCHES = 6, 2, 8, 12, 3
PRODUCT = 2 * ROWS * BATCH * IN * OUT
SPLITS = [5, 0, 7]


def layer(kind, fused, dtype=torch.float32):
    torch.manual_seed(1)
    options = {"bias": True, "params_dtype": dtype, "device": "cpu"}
    options |= {"fuse_wgrad_accumulation": fused}
    if kind == "grouped":
        module = GroupedLinear(len(SPLITS), IN, OUT, init_method=torch.nn.init.normal_, **options)
    else:
        module = {"linear": Linear, "norm": LayerNormLinear}[kind](
            IN, OUT, init_method=torch.nn.init.normal_, **options
        )
    for name, parameter in module.named_parameters():
        if fused and name.startswith("weight"):
            parameter.main_grad = torch.zeros_like(parameter, dtype=torch.float32)
    return module


def batches(dtype=torch.float32):
    generator = torch.Generator().manual_seed(2)
    return [
        tuple(torch.randn(ROWS, BATCH, size, generator=generator).to(dtype) for size in (IN, OUT))
        for _ in range(MICRO_BATCHES)
    ]


def forward(module, x):
    if isinstance(module, GroupedLinear):
        return module(x.view(-1, IN), SPLITS).view(ROWS, BATCH, OUT)
    return module(x)


def gradients(module):
    return {
        name: getattr(parameter, "main_grad", parameter.grad)
        for name, parameter in module.named_parameters()
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("kind", ["linear", "norm", "grouped"])
def test_divided_backward_equals_the_whole_one(kind, fused, dtype):
    whole, divided = layer(kind, fused, dtype), layer(kind, fused, dtype)
    store = divided.weight_gradients = WeightGradients()
    xs = [x.requires_grad_() for x, _ in batches(dtype)]
    ys = [x.detach().clone().requires_grad_() for x in xs]
    for x, (_, grad) in zip(xs, batches(dtype), strict=True):
        forward(whole, x).backward(grad)
    grads = [grad for _, grad in batches(dtype)]
    flops = []
    with store.splitting():
        outputs = [forward(divided, y) for y in ys]
        for number in range(2):
            with FlopCounter() as counter, store.deferred((0, number)):
                outputs[number].backward(grads[number])
            flops.append(counter.count.total)
        assert store.pending == ((0, 0), (0, 1))
        for number in range(2):
            with FlopCounter() as counter:
                store.compute((0, number))
            flops.append(counter.count.total)
        with FlopCounter() as counter:  # a whole backward between divided ones
            outputs[2].backward(grads[2])
    assert flops == [PRODUCT] * 4, "I has no product of W, W has one"
    assert counter.count.total == 2 * PRODUCT
    assert store.computed == 2
    for x, y in zip(xs, ys, strict=True):
        assert torch.equal(x.grad, y.grad)
    expected, found = gradients(whole), gradients(divided)
    for name in found:
        assert found[name].any() or name.endswith("1"), name  # an expert without tokens
        assert torch.equal(expected[name], found[name]), name


@pytest.mark.parametrize("recipe", [DelayedScaling, Float8CurrentScaling])
@pytest.mark.parametrize("kind", ["linear", "grouped"])
def test_operands_in_fp8_are_those_of_the_whole_backward(kind, recipe):
    """The factors of delayed scaling change with every backward."""
    whole, divided = (fp8_layer(kind) for _ in range(2))
    store = divided.weight_gradients = WeightGradients()
    generator = torch.Generator().manual_seed(3)
    xs = [torch.randn(48, 32, generator=generator) * 2.3**i for i in range(3)]
    grads = [torch.randn(48, 48, generator=generator) * 1.7**i for i in range(3)]
    for module in (whole, divided):
        with store.splitting():
            outputs = []
            for x in xs:
                with fp8.fp8_autocast(enabled=True, fp8_recipe=recipe()):
                    splits = () if kind == "linear" else ([16, 32],)
                    outputs.append(module(x.clone().requires_grad_(), *splits))
            for number, (out, grad) in enumerate(zip(outputs, grads, strict=True)):
                with store.deferred((0, number)):
                    out.backward(grad)
            for number in range(3):
                store.compute((0, number))
    assert store.computed == 3
    for p, q in zip(whole.parameters(), divided.parameters(), strict=True):
        assert torch.equal(p.grad, q.grad)


def fp8_layer(kind):
    torch.manual_seed(1)
    options = {"bias": False, "params_dtype": torch.float32, "device": "cpu"}
    if kind == "grouped":
        return GroupedLinear(2, 32, 48, init_method=torch.nn.init.normal_, **options)
    return Linear(32, 48, init_method=torch.nn.init.normal_, **options)


def test_layers_that_autograd_would_not_reach_are_undivided():
    store = WeightGradients()
    frozen, first = layer("linear", False), layer("linear", False)
    frozen.weight_gradients = first.weight_gradients = store
    frozen.weight.requires_grad_(False)
    (x, grad), *_ = batches()
    with store.splitting(), store.deferred((0, 0)):
        first(x).backward(grad)
        frozen(x.clone().requires_grad_()).backward(grad)
        assert first.weight.grad is not None
        assert not store.bytes
    outside = layer("linear", False)
    outside.weight_gradients = store
    outside(x.clone().requires_grad_()).backward(grad)
    assert torch.equal(outside.weight.grad, first.weight.grad)


def test_a_stash_is_inputs_and_output_gradients_each_storage_once():
    modules = [layer("linear", False) for _ in range(2)]
    store = WeightGradients()
    for module in modules:
        module.weight_gradients = store
    (x, _), *_ = batches()
    with store.splitting():
        y = x.clone().requires_grad_().tanh()
        out = modules[0](y) + modules[1](y)  # one input; one output gradient
        with store.deferred((0, 0)):
            out.backward(torch.ones_like(out))
        assert store.bytes == 4 * ROWS * BATCH * (IN + OUT)
        del y, out
        store.compute((0, 0))
        assert store.bytes == 0
    assert store.peak_bytes == 4 * ROWS * BATCH * (IN + OUT)


def test_a_step_that_fails_leaves_nothing_behind():
    module = layer("linear", False)
    store = module.weight_gradients = WeightGradients()
    (x, grad), *_ = batches()
    with pytest.raises(RuntimeError, match="stage fails"), store.splitting():
        with store.deferred((0, 0)):
            module(x.clone().requires_grad_()).backward(grad)
        raise RuntimeError("stage fails")
    assert not store.pending
    assert not store.bytes
    with pytest.raises(KeyError):
        store.compute((0, 0))
    with store.splitting(), store.deferred((0, 0)):
        pass
    assert module.weight.grad is None


def test_one_w_for_each_i():
    store = WeightGradients()
    with store.splitting():
        with store.deferred((1, 2)):
            pass
        with pytest.raises(ValueError, match="stage 1, micro-batch 2"), store.deferred((1, 2)):
            pass


def test_host_memory_holds_stashes_that_nobody_else_holds():
    modules = [layer("linear", False) for _ in range(3)]
    store = WeightGradients(StashSwap())
    for module in modules:
        module.weight_gradients = store
    (x, grad), *_ = batches()
    x = x.clone().requires_grad_()
    with store.splitting():
        shared, own = x.tanh(), x.sin()
        outputs = [modules[0](shared), modules[1](own), modules[2](own.view(-1, IN))]
        with store.deferred((0, 0)):
            grads = [grad.clone(), grad.clone(), grad.clone().view(-1, OUT)]
            torch.autograd.backward(outputs, grads)
        expected = [gradient(shared, grad), gradient(own, grad), gradient(own, grad)]
        del own, outputs, grads
        inputs, outs = 4 * ROWS * BATCH * IN, 4 * ROWS * BATCH * OUT
        assert store.bytes == 2 * inputs + 3 * outs
        store.offload((0, 0))
        assert store.bytes == inputs, "the test still holds one input"
        assert store.swap.figures.copied_out == inputs + 3 * outs, "two views are copied once"
        assert store.swap.pool.used
        store.load((0, 0))
        assert store.swap.figures.copied_in == store.swap.figures.copied_out
        assert store.bytes == 2 * inputs + 3 * outs
        store.compute((0, 0))
        assert store.bytes == 0
    assert store.swap.pool.used == 0
    for module, wgrad in zip(modules, expected, strict=True):
        assert torch.equal(module.weight.grad, wgrad)


def test_host_memory_is_checked_before_it_is_used():
    seen = []
    module = layer("linear", False)
    store = WeightGradients(StashSwap(check=lambda *given: seen.append(given)))
    module.weight_gradients = store
    (x, grad), *_ = batches()
    with store.splitting():
        for number in range(2):
            with store.deferred((3, number)):
                module(x.clone().requires_grad_().tanh()).backward(grad.clone())
            store.offload((3, number))
    inputs, outs = 4 * ROWS * BATCH * IN, 4 * ROWS * BATCH * OUT
    assert seen == [(3, inputs), (3, inputs + outs)], "of the largest"
    assert not store.swap.pool.used, "the step ended without W"


def gradient(x, grad):
    return (grad.reshape(-1, OUT).t() @ x.reshape(-1, IN)).detach()


def test_a_w_without_l_brings_its_stash_back():
    module = layer("linear", False)
    store = module.weight_gradients = WeightGradients(StashSwap())
    (x, grad), *_ = batches()
    with store.splitting():
        with store.deferred((0, 0)):
            module(x.clone().requires_grad_().tanh()).backward(grad.clone())
        store.offload((0, 0))
        assert store.bytes == 0
        store.compute((0, 0))
    assert torch.equal(module.weight.grad, gradient(x.tanh(), grad))


RECOMPUTE = {
    "recompute_granularity": "full",
    "recompute_method": "uniform",
    "recompute_num_layers": 1,
}
CASES = {
    "dense": Case("layernorm-gelu-bias", fused=True),
    "dense-local": Case("layernorm-gelu-bias", "local"),
    "grouped-experts": Case("moe-grouped"),
    "grouped-experts-local": Case("moe-grouped", "local", fused=True),
    "latent-attention": Case("mla"),
    "latent-attention-local": Case("mla", "local", fused=True),
    "recomputed": Case("rmsnorm-swiglu-gqa", fused=True, options=RECOMPUTE),
    "recomputed-local": Case("rmsnorm-swiglu-gqa", "local", options=RECOMPUTE),
}
EXPERTS_ONE_BY_ONE = {
    "experts": Case("moe-sequential", fused=True),
    "experts-local": Case("moe-sequential", "local"),
}
IN_16_BITS = {"bf16": True, "params_dtype": torch.bfloat16, "add_bias_linear": False}
LAYERS = {n: Case("layernorm-gelu-bias", options=IN_16_BITS | {"num_layers": n}) for n in (1, 2)}
SMALL = ("norm", "bias", "router", "embedding", "output_layer")


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 2], ids=["one-rank", "sequence-parallel"])
def test_models_divided_equal_models_whole(ranks, size):
    cases = {**CASES, **(EXPERTS_ONE_BY_ONE if size == 1 else {})}
    for results in ranks(size, compare, cases, setup="tests.support.warm", timeout=240):
        for name, found in results.items():
            assert not found.different, name
            assert found.flops["I"] + found.flops["W"] == found.flops["B"], name
            others = [n for n in found.undivided if not any(small in n for small in SMALL)]
            assert not others, name
        row = 4 * gpt_ranks.SEQUENCE * gpt_ranks.BATCH * 32 // size
        inputs, output_gradients = 1 + 1 + 1 + 4, 3 + 1 + 4 + 1
        for name in ("dense", "dense-local"):  # shards are gathered in W, not kept
            assert results[name].stash == 2 * (inputs + output_gradients) * row
            assert results[name].stash < results[name].saved
        assert results["recomputed"].stash > results["recomputed"].saved
        gathers, layers = results["dense"].gathers, 2 * 2 * (size - 1)  # column, and row
        assert gathers["W"] == 2 * layers, "of inputs and of output gradients"
        assert gathers["I"] == gathers["B"] - layers, "an output gradient is gathered twice"


def test_what_a_dense_layer_keeps_for_its_w_of_what_it_kept_for_backward(ranks):
    (found,) = ranks(1, compare, LAYERS, setup="tests.support.warm", timeout=240)
    unit = gpt_ranks.SEQUENCE * gpt_ranks.BATCH * 32  # s b h
    kept = {name: getattr(found[2], name) - getattr(found[1], name) for name in ("saved", "stash")}
    assert kept == {"saved": 33.75 * unit, "stash": 32 * unit}


def test_whole_backwards_beside_divided_ones_delay_their_weight_gradients():
    """The part of a layer that hides a dispatch computes them; an I keeps its own."""
    torch.manual_seed(1)
    module = Linear(
        IN, OUT, init_method=torch.nn.init.normal_, bias=False, params_dtype=torch.float32,
        device="cpu", fuse_wgrad_accumulation=True, delay_wgrad_compute=True,
    )  # fmt: skip
    module.weight.main_grad = torch.zeros(OUT, IN)
    store = module.weight_gradients = WeightGradients()
    x, grad = batches()[0]
    with store.splitting():
        for key in ((0, 0), None):
            y = module(x.clone().requires_grad_())
            with store.deferred(key) if key else nullcontext():
                y.backward(grad)
            assert not module.weight.main_grad.any()
        module.register_wgrad_accumulation_and_reduce_hooks(pytest.fail)  # the plan reduces
        module.backward_dw()
        first = module.weight.main_grad.clone()
        assert first.any() and store.pending == ((0, 0),)
        module.backward_dw()  # the I has left nothing here
        assert torch.equal(module.weight.main_grad, first)
        store.compute((0, 0))
    torch.testing.assert_close(module.weight.main_grad, 2 * first)
