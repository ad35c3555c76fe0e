"""Linear layers: outputs, gradients, where the weight gradient goes, parameter attributes."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.nn.functional as F

from mindspeed.te.base import get_dummy_wgrad
from mindspeed.te.grouped import GroupedLinear
from mindspeed.te.linear import LayerNormLinear, Linear
from tests.te import tp_ranks


def _linear(**options):
    torch.manual_seed(0)
    layer = Linear(6, 4, **options)
    torch.nn.init.normal_(layer.weight)
    if layer.bias is not None:
        torch.nn.init.normal_(layer.bias)
    return layer


@pytest.mark.parametrize("bias", [True, False])
def test_linear_equals_functional_linear(bias):
    layer, x = _linear(bias=bias), torch.randn(5, 2, 6, requires_grad=True)
    y = layer(x)
    y.square().sum().backward()
    x2 = x.detach().clone().requires_grad_()
    w2, b2 = (
        None if p is None else p.detach().clone().requires_grad_()
        for p in (layer.weight, layer.bias)
    )
    expected = F.linear(x2, w2, b2)
    expected.square().sum().backward()
    assert torch.equal(y, expected)
    torch.testing.assert_close(x.grad, x2.grad, rtol=0, atol=1e-6)
    torch.testing.assert_close(layer.weight.grad, w2.grad, rtol=0, atol=1e-5)
    if bias:
        torch.testing.assert_close(layer.bias.grad, b2.grad, rtol=0, atol=1e-5)


def test_return_bias_leaves_the_bias_to_the_caller():
    layer, x = _linear(return_bias=True), torch.randn(3, 6)
    y, bias = layer(x)
    assert bias is layer.bias
    assert torch.equal(y, F.linear(x, layer.weight))


def test_fused_weight_gradient_accumulates_in_main_grad_over_microbatches():
    layer, plain = _linear(fuse_wgrad_accumulation=True), _linear()
    layer.weight.main_grad = torch.zeros(4, 6)
    layer.weight.grad_added_to_main_grad = False
    for seed in range(3):
        x = torch.randn(5, 6, generator=torch.Generator().manual_seed(seed))
        layer(x).square().sum().backward()
        plain(x).square().sum().backward()
        assert layer.weight.grad_added_to_main_grad
        assert layer.weight.grad.shape == layer.weight.shape
        layer.weight.grad = None
    torch.testing.assert_close(layer.weight.main_grad, plain.weight.grad, rtol=1e-6, atol=1e-5)


def test_fused_weight_gradient_of_bf16_keeps_fp32_precision():
    layer = Linear(64, 8, bias=False, params_dtype=torch.bfloat16, fuse_wgrad_accumulation=True)
    layer.weight.main_grad = torch.zeros(8, 64)
    x, g = torch.randn(128, 64).bfloat16(), torch.randn(128, 8).bfloat16()
    layer(x).backward(g)
    expected = g.double().t() @ x.double()
    torch.testing.assert_close(layer.weight.main_grad.double(), expected, rtol=1e-5, atol=1e-4)


def test_zero_out_wgrad_makes_the_placeholder_zero():
    layer = _linear(fuse_wgrad_accumulation=True)
    get_dummy_wgrad(layer.weight.shape, layer.weight.dtype).fill_(3.0)
    layer.weight.main_grad = torch.zeros(4, 6)
    layer.weight.grad_added_to_main_grad = False
    layer.weight.zero_out_wgrad = True
    layer(torch.randn(5, 6)).sum().backward()
    assert not layer.weight.grad.any()


def test_delayed_weight_gradients_come_in_order_with_backward_dw():
    layer, plain = _linear(delay_wgrad_compute=True), _linear()
    calls = []
    layer.register_wgrad_accumulation_and_reduce_hooks(lambda: calls.append(1))
    for _ in range(2):
        x = torch.randn(5, 6)
        layer(x).square().sum().backward()
        plain(x).square().sum().backward()
    assert layer.weight.grad is None
    torch.testing.assert_close(layer.bias.grad, plain.bias.grad)
    layer.backward_dw()
    layer.backward_dw()
    layer.backward_dw()
    assert len(calls) == 2
    torch.testing.assert_close(layer.weight.grad, plain.weight.grad, rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize("fused", [False, True])
def test_delayed_weight_gradients_call_the_accumulation_hook(fused):
    layer, plain = _linear(delay_wgrad_compute=True, fuse_wgrad_accumulation=fused), _linear()
    layer.weight.main_grad = torch.zeros(4, 6)
    layer.weight.grad_added_to_main_grad = False

    def owner():  # what Megatron's DistributedDataParallel does
        assert layer.weight.grad is not None
        if not layer.weight.grad_added_to_main_grad:
            layer.weight.main_grad.add_(layer.weight.grad)
        layer.weight.grad = None

    assert layer.weight.skip_backward_post_hook
    assert not hasattr(layer.bias, "skip_backward_post_hook")
    assert not hasattr(plain.weight, "skip_backward_post_hook")
    layer.register_wgrad_accumulation_and_reduce_hooks(owner)
    for _ in range(2):
        x = torch.randn(5, 6)
        layer(x).square().sum().backward()
        plain(x).square().sum().backward()
        layer.backward_dw()
    torch.testing.assert_close(layer.weight.main_grad, plain.weight.grad, rtol=1e-6, atol=1e-5)


def test_frozen_weight_saves_no_input():
    layer = _linear()
    layer.weight.requires_grad_(False)
    x = torch.randn(5, 6, requires_grad=True)
    y = layer(x)
    assert y.grad_fn.saved_tensors[0] is None
    y.sum().backward()
    assert layer.weight.grad is None
    torch.testing.assert_close(x.grad, layer.weight.sum(0).expand(5, 6))


@pytest.mark.parametrize("normalization", ["LayerNorm", "RMSNorm"])
@pytest.mark.parametrize("zero_centered", [False, True])
def test_layernorm_linear_equals_norm_then_linear(normalization, zero_centered):
    torch.manual_seed(1)
    layer = LayerNormLinear(
        6, 4, normalization=normalization, zero_centered_gamma=zero_centered,
        return_layernorm_output=True,
    )  # fmt: skip
    torch.nn.init.normal_(layer.layer_norm_weight)
    x = torch.randn(5, 2, 6)
    y, normed = layer(x)
    gamma = layer.layer_norm_weight + 1 if zero_centered else layer.layer_norm_weight
    if normalization == "RMSNorm":
        expected = F.rms_norm(x, (6,), gamma, 1e-5)
        assert layer.layer_norm_bias is None
    else:
        expected = F.layer_norm(x, (6,), gamma, layer.layer_norm_bias, 1e-5)
    torch.testing.assert_close(normed, expected, rtol=0, atol=1e-6)
    torch.testing.assert_close(y, F.linear(expected, layer.weight, layer.bias))


def test_autocast_computes_in_the_autocast_dtype():
    layer, x = _linear(), torch.randn(5, 6, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = layer(x)
    assert y.dtype == torch.bfloat16
    y.sum().backward()
    assert x.grad.dtype == layer.weight.grad.dtype == torch.float32


@pytest.mark.parametrize(
    ("mode", "tracker", "dim"),
    [
        ("column", None, 0),
        ("row", None, 1),
        (None, "expert-parallel-rng", 0),
        (None, "data-parallel-rng", None),
    ],
)
def test_weight_is_marked_as_a_shard_unless_it_is_a_duplicate(mode, tracker, dim):
    class Tracker:
        def fork(self, name="model-parallel-rng"):
            self.name = name
            return torch.no_grad()

    seen = Tracker()
    weight = Linear(
        6, 4, parallel_mode=mode, rng_tracker_name=tracker, get_rng_state_tracker=lambda: seen
    ).weight
    assert seen.name == (tracker or "model-parallel-rng")
    assert getattr(weight, "tensor_model_parallel", False) is (dim is not None)
    assert getattr(weight, "partition_dim", None) == dim


@pytest.mark.parametrize("layer", [Linear, LayerNormLinear, partial(GroupedLinear, 2)])
def test_linear_modules_read_their_options_alike(layer):
    options = {"tp_size": 2, "sequence_parallel": True, "init_method": torch.nn.init.ones_}
    column = layer(8, 6, parallel_mode="column", **options)
    row = layer(8, 6, parallel_mode="row", return_bias=True, **options)
    alone = layer(8, 6, **{**options, "tp_size": 1})
    sizes = [(m.in_features, m.out_features) for m in (column, row, alone)]
    assert sizes == [(8, 3), (4, 6), (8, 6)]
    assert [m.sequence_parallel for m in (column, row, alone)] == [True, True, False]
    assert [m.apply_bias for m in (column, row, alone)] == [True, False, True]
    with pytest.raises(ValueError, match="parallel_mode 'rows' is not one of column, row, None"):
        layer(8, 6, parallel_mode="rows")
    with pytest.raises(ValueError, match="out_features = 7 is not divisible"):
        layer(8, 7, parallel_mode="column", **options)


def test_extra_state_is_an_empty_tensor_and_foreign_state_is_not_unpickled():
    layer = _linear()
    state = layer.state_dict()
    assert state["_extra_state"].numel() == 0
    state["_extra_state"] = torch.frombuffer(bytearray(b"not a pickle"), dtype=torch.uint8)
    with pytest.warns(UserWarning, match="fp8 scaling factors"):
        layer.load_state_dict(state)


def test_userbuffers_are_refused_by_name():
    with pytest.raises(NotImplementedError, match="tp-comm-overlap"):
        Linear(6, 4, ub_overlap_ag=True)
    with pytest.raises(TypeError, match="colour"):
        Linear(6, 4, colour="red")


@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["tp", "sp"])
@pytest.mark.parametrize("fused", [False, True], ids=["plain", "main_grad"])
def test_column_and_row_parallel_layers_equal_the_whole_layer(ranks, sequence_parallel, fused):
    whole = ranks(1, tp_ranks.mlp, False, fused)[0]
    parts = ranks(2, tp_ranks.mlp, sequence_parallel, fused, 2)
    assert all(part.keys() == whole.keys() for part in parts)
    for name, value in tp_ranks.join(parts, sequence_parallel).items():
        torch.testing.assert_close(value, whole[name], rtol=0, atol=1e-10, msg=name)


def test_the_group_overrides_tp_size(ranks):
    whole = ranks(1, tp_ranks.mlp, False, False)[0]
    parts = ranks(2, tp_ranks.mlp, False, False, 1)
    for name, value in tp_ranks.join(parts, False).items():
        torch.testing.assert_close(value, whole[name], rtol=0, atol=1e-10, msg=name)


def test_gathered_normalised_input_has_the_gradients_of_all_ranks(ranks):
    whole = ranks(1, tp_ranks.gathered_norm, False)[0]
    parts = ranks(2, tp_ranks.gathered_norm, True)
    found = {
        "output": torch.cat([part["output"] for part in parts], -1),
        "normed": parts[1]["normed"],
        "input": torch.cat([part["input"] for part in parts]),
        "gamma": sum(part["gamma"] for part in parts),
        "beta": sum(part["beta"] for part in parts),
    }
    for name, value in found.items():
        torch.testing.assert_close(value, whole[name], rtol=0, atol=1e-10, msg=name)
