"""fp8 recipes on the CPU against a table of all 256 numbers of each format, in float64."""

from __future__ import annotations

import pytest
import torch

from mindspeed.te import fp8
from mindspeed.te.fp8_state import Fp8Padding, Fp8Unpadding
from mindspeed.te.grouped import GroupedLinear
from mindspeed.te.linear import LayerNormLinear, Linear
from mindspeed.te.recipes import (
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    Format,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
)

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
STATELESS = [Float8CurrentScaling, Float8BlockScaling, MXFP8BlockScaling]
FORMATS = {Format.E4M3: (E4M3, E4M3), Format.HYBRID: (E4M3, E5M2)}


def nearest(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The closest finite number of an 8-bit format, ties to the even code; float64."""
    codes = torch.arange(128, dtype=torch.uint8)  # the positive half
    table = codes.view(dtype).double()
    codes, table = codes[table.isfinite()], table[table.isfinite()]
    high = torch.searchsorted(table, x.double().abs()).clamp(max=len(table) - 1)
    low = (high - 1).clamp(min=0)
    up, down = table[high] - x.double().abs(), x.double().abs() - table[low]
    choose_low = (down < up) | ((down == up) & (codes[low] % 2 == 0))
    return torch.where(choose_low, table[low], table[high]) * x.double().sign()


def quantised(x: torch.Tensor, dtype: torch.dtype, recipe: type, summed: int, weight: bool):
    """``x`` as the recipe stores it, block after block."""
    top = torch.finfo(dtype).max
    blocks = {Float8CurrentScaling: x.shape, MXFP8BlockScaling: (1, 32)}.get(recipe, (1, 128))
    if recipe is Float8BlockScaling and weight:
        blocks = (128, 128)
    if summed == 0:
        blocks = x.shape if recipe is Float8CurrentScaling else blocks
        blocks = blocks if blocks == (128, 128) or blocks == x.shape else blocks[::-1]
    out = torch.empty_like(x, dtype=torch.float64)
    for i in range(0, x.shape[0], blocks[0]):
        for j in range(0, x.shape[1], blocks[1]):
            part = x[i : i + blocks[0], j : j + blocks[1]].double()
            amax = part.abs().max()
            scale = torch.tensor(1.0, dtype=torch.float64)
            if amax > 0 and recipe is Float8CurrentScaling:
                scale = top / amax
            elif amax > 0:
                scale = 2.0 ** torch.floor(torch.log2(top / amax))
            out[i : i + blocks[0], j : j + blocks[1]] = nearest(part * scale, dtype) / scale
    return out


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    spread = torch.randn(shape, generator=generator) * 3  # magnitudes over some powers of two
    return (torch.randn(shape, generator=generator) * spread.exp()).to(dtype)


def expected(x, weight, dy, recipe: type, format_: Format):
    """Output, input gradient and weight gradient, in float64."""
    forward, backward = FORMATS[format_]
    q = lambda t, dtype, summed, weight=False: quantised(t, dtype, recipe, summed, weight)  # noqa: E731
    return (
        q(x, forward, 1) @ q(weight, forward, 1, True).t(),
        q(dy, backward, 1) @ q(weight, forward, 0, True),
        q(dy, backward, 0).t() @ q(x, forward, 0),
    )


def assert_close(out: torch.Tensor, truth: torch.Tensor) -> None:
    """fp32 sums of a few hundred terms, and fp32 factors."""
    torch.testing.assert_close(
        out.double(), truth, rtol=0, atol=2e-5 * float(truth.abs().max() + 1e-30)
    )


def run(module, x, dy, recipe, **more):
    x = x.clone().requires_grad_()
    with fp8.fp8_autocast(enabled=True, fp8_recipe=recipe):
        out = module(x, **more)
    out.backward(dy)
    return out.detach(), x.grad


@pytest.mark.slow
@pytest.mark.parametrize("format_", FORMATS)
@pytest.mark.parametrize("recipe", STATELESS)
def test_linear_multiplies_quantised_operands(recipe, format_):
    layer = Linear(160, 192, bias=False)
    layer.weight.data = random(192, 160, seed=1)
    x, dy = random(32, 160), random(32, 192, seed=2)
    out, dx = run(layer, x.view(2, 16, 160), dy.view(2, 16, 192), recipe(fp8_format=format_))
    truth = expected(x, layer.weight.detach(), dy, recipe, format_)
    for one, other in zip(
        (out.flatten(0, 1), dx.flatten(0, 1), layer.weight.grad), truth, strict=True
    ):
        assert_close(one, other)


def test_the_reference_distinguishes_recipes_and_formats():
    x, weight, dy = random(32, 64), random(96, 64, seed=1), random(32, 96, seed=2)
    results = [expected(x, weight, dy, r, f) for r in STATELESS for f in FORMATS]
    plain = (
        x.double() @ weight.double().t(),
        dy.double() @ weight.double(),
        dy.double().t() @ x.double(),
    )
    for result in results:
        assert all(
            float((a - b).abs().max() / b.abs().max()) > 1e-4
            for a, b in zip(result, plain, strict=True)
        )
    assert not torch.equal(results[0][1], results[1][1])  # hybrid changes gradients
    assert torch.equal(results[0][0], results[1][0])  # and nothing forward


@pytest.mark.parametrize("recipe", STATELESS)
def test_norm_and_bias_stay_outside(recipe):
    layer = LayerNormLinear(96, 64, normalization="RMSNorm")
    layer.weight.data, layer.bias.data = random(64, 96, seed=1), random(64, seed=3)
    x, dy = random(32, 96), random(32, 64, seed=2)
    out, _ = run(layer, x, dy, recipe())
    normed = torch.nn.functional.rms_norm(x, (96,), layer.layer_norm_weight, 1e-5).detach()
    format_ = recipe().fp8_format
    truth = expected(normed, layer.weight.detach(), dy, recipe, format_)[0]
    assert_close(out, truth + layer.bias.detach().double())
    torch.testing.assert_close(layer.bias.grad, dy.sum(0))


@pytest.mark.slow
@pytest.mark.parametrize("recipe", STATELESS)
@pytest.mark.parametrize("fused", [False, True], ids=["plain", "main_grad"])
def test_experts_are_quantised_one_by_one(recipe, fused):
    splits = [32, 0, 64]
    layer = GroupedLinear(3, 96, 64, bias=False, fuse_wgrad_accumulation=fused)
    weights = [getattr(layer, f"weight{i}") for i in range(3)]
    for i, weight in enumerate(weights):
        weight.data = random(64, 96, seed=i) * 10.0**i
        weight.main_grad = torch.ones(64, 96) if fused else None
        weight.grad_added_to_main_grad = False
    x, dy = random(96, 96), random(96, 64, seed=7)
    x[32:] *= 1e-3
    out, dx = run(layer, x, dy, recipe(), m_splits=splits)
    format_ = recipe().fp8_format
    for i, rows in enumerate(torch.arange(96).split(splits)):
        if not len(rows):
            continue
        truth = expected(x[rows], weights[i].detach(), dy[rows], recipe, format_)
        wgrad = weights[i].main_grad - 1 if fused else weights[i].grad
        for one, other in zip((out[rows], dx[rows]), truth[:2], strict=True):
            assert_close(one, other)
        torch.testing.assert_close(
            wgrad.double(), truth[2], rtol=1e-4, atol=1e-4 * float(truth[2].abs().max())
        )


@pytest.mark.parametrize("algo", ["max", "most_recent"])
def test_delayed_scaling_uses_the_maxima_of_earlier_steps(algo):
    recipe = DelayedScaling(1, Format.HYBRID, 3, algo)
    layer = Linear(32, 48, bias=False)
    layer.weight.data = random(48, 32, seed=1)
    weight = layer.weight.detach().clone()
    history = {name: [0.0] for name in ("x", "weight", "dy")}
    scale = dict.fromkeys(history, 1.0)
    for step, size in enumerate((1e-3, 1.0, 0.1, 0.01, 0.0, 1e3)):
        x, dy = random(16, 32, seed=step) * size, random(16, 48, seed=step + 50) * size
        layer.weight.grad = None
        out, dx = run(layer, x, dy, recipe)

        def q(t, name, dtype):
            top = torch.finfo(dtype).max
            return nearest((t.double() * scale[name]).clamp(-top, top), dtype) / scale[name]

        results = (out, dx, layer.weight.grad)
        qx, qw, qdy = q(x, "x", E4M3), q(weight, "weight", E4M3), q(dy, "dy", E5M2)
        for one, truth in zip(results, (qx @ qw.t(), qdy @ qw, qdy.t() @ qx), strict=True):
            assert_close(one, truth)
        for name, tensor, top in (("x", x, 448), ("weight", weight, 448), ("dy", dy, 57344)):
            seen = history[name] = [*history[name], float(tensor.abs().max())][-3:]
            amax = max(seen) if algo == "max" else seen[-1]
            scale[name] = top / amax / 2 if amax > 0 else scale[name]


def test_weight_gradients_from_operands_that_were_not_quantised():
    recipe = DelayedScaling(override_linear_precision=(False, False, True))
    layer = Linear(32, 48, bias=False)
    x, dy = random(16, 32), random(16, 48, seed=2)
    run(layer, x, dy, recipe)
    torch.testing.assert_close(layer.weight.grad, dy.t() @ x)


def test_outside_of_the_context_nothing_is_quantised():
    layer = Linear(30, 7, bias=False)  # sizes that fp8 would not take
    x = random(3, 30)
    plain = layer(x)
    with fp8.fp8_autocast(enabled=True, fp8_recipe=Float8CurrentScaling()), fp8.fp8_autocast():
        assert torch.equal(layer(x), plain)


def test_recomputation_uses_the_factors_of_the_first_run():
    from mindspeed.te.distributed import checkpoint

    def train(again: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        layers = torch.nn.Sequential(Linear(32, 32), torch.nn.ReLU(), Linear(32, 32))
        recipe, results = DelayedScaling(amax_history_len=2), []
        for step in range(3):
            x = (random(16, 32, seed=step) * 10.0**step).requires_grad_()
            with fp8.fp8_autocast(enabled=True, fp8_recipe=recipe):
                out = checkpoint(layers, x) if again else layers(x)
            (out**2).sum().backward()
            results += [out.detach(), x.grad, *(p.grad.clone() for p in layers.parameters())]
        return results

    for one, other in zip(train(False), train(True), strict=True):
        assert torch.equal(one, other)


def test_a_weight_keeps_its_factor_within_a_step():
    layer, recipe = Linear(32, 16, bias=False), DelayedScaling(amax_history_len=1)
    layer.weight.data = torch.rand(16, 32) * 1e-5  # far below the smallest number at factor 1
    x, outs = random(16, 32, seed=1), []
    for first in (True, False, True):
        with fp8.fp8_autocast(enabled=True, fp8_recipe=recipe):
            outs.append(layer(x, is_first_microbatch=first).detach())
    assert not outs[0].any() and not outs[1].any() and outs[2].any()


@pytest.mark.parametrize(
    ("recipe", "size", "text"),
    [
        (Float8CurrentScaling, (12, 32), "rows divisible by 8"),
        (DelayedScaling, (8, 24), "columns by 16"),
        (MXFP8BlockScaling, (16, 32), "rows divisible by 32"),
    ],
)
def test_sizes_that_the_hardware_refuses_are_refused(recipe, size, text):
    layer = Linear(size[1], 32, bias=False)
    with fp8.fp8_autocast(enabled=True, fp8_recipe=recipe()), pytest.raises(ValueError, match=text):
        layer(random(*size))


def test_padding_of_experts_and_back():
    x = random(7, 4)
    padded, splits = Fp8Padding(3)(x, [5, 0, 2])
    assert splits == [16, 0, 16] and padded.shape == (32, 4)
    assert torch.equal(Fp8Unpadding(3)(padded, [5, 0, 2]), x)
    with fp8.fp8_autocast(enabled=True, fp8_recipe=MXFP8BlockScaling()):
        assert Fp8Padding(1)(x, [7])[1] == [32]


def test_zeros_infinities_and_empty_tensors():
    from mindspeed.te import quantization as q

    assert not q.per_tensor(torch.zeros(4, 4), E4M3).any()
    assert q.per_tensor(torch.empty(0, 4), E4M3).shape == (0, 4)
    assert float(q.per_tensor(torch.tensor([[float("inf"), 1.0]]), E4M3)[0, 0]) == 448
    assert q.per_tensor(torch.tensor([[float("nan"), 1.0]]), E4M3)[0, 0].isnan()
    tiny = torch.full((32, 32), 2.0**-140)
    assert q.per_block(tiny, E4M3, (1, 32), q.mx_scale_of).isfinite().all()


@pytest.mark.parametrize(
    "start",
    [
        lambda: fp8.fp8_model_init(enabled=True),
        lambda: fp8.fp8_autocast(enabled=True, fp8_recipe=NVFP4BlockScaling()).__enter__(),
        lambda: fp8.fp8_autocast(
            enabled=True, fp8_recipe=Float8CurrentScaling(fp8_dpa=True)
        ).__enter__(),
        lambda: fp8.fp8_autocast(calibrating=True).__enter__(),
    ],
)
def test_unsupported_options_are_refused(start):
    with pytest.raises(NotImplementedError, match="emulated"):
        start()


def test_delayed_scaling_factors_are_saved_and_loaded():
    recipe = DelayedScaling(amax_history_len=4)
    layer, resumed = Linear(32, 16, bias=False), Linear(32, 16, bias=False)
    for step in range(3):
        run(layer, random(16, 32, seed=step), random(16, 16, seed=step + 9), recipe)
    state = layer.state_dict()
    assert state["_extra_state"].dtype == torch.uint8
    resumed.load_state_dict(state)
    assert torch.equal(resumed.state_dict()["_extra_state"], state["_extra_state"])
    x, dy = random(16, 32, seed=5), random(16, 16, seed=6)
    for one, other in zip(run(layer, x, dy, recipe), run(resumed, x, dy, recipe), strict=True):
        assert torch.equal(one, other)
    fresh = Linear(32, 16, bias=False)
    fresh.weight.data = layer.weight.data
    assert not torch.equal(run(fresh, x, dy, recipe)[0], run(resumed, x, dy, recipe)[0])


def test_another_amax_history_length_starts_from_the_saved_scales():
    layer, resumed = Linear(32, 16, bias=False), Linear(32, 16, bias=False)
    run(layer, random(16, 32), random(16, 16), DelayedScaling(amax_history_len=4))
    resumed.load_state_dict(layer.state_dict())
    x, dy = random(16, 32, seed=5), random(16, 16, seed=6)
    out = run(layer, x, dy, DelayedScaling(amax_history_len=4))[0]
    assert torch.equal(run(resumed, x, dy, DelayedScaling(amax_history_len=2))[0], out)
