"""The operation-based interface and the joint MLP module."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from mindspeed.te import ops
from mindspeed.te.layernorm_mlp import ACTIVATIONS, LayerNormMLP


def tanh_gelu(x):
    return F.gelu(x, approximate="tanh")


@pytest.mark.parametrize(
    ("kind", "function", "gated"),
    [
        (ops.GELU, tanh_gelu, False),
        (ops.ReLU, F.relu, False),
        (ops.SiLU, F.silu, False),
        (ops.GEGLU, tanh_gelu, True),
        (ops.ReGLU, F.relu, True),
        (ops.SwiGLU, F.silu, True),
    ],
)
def test_activations(kind, function, gated):
    x = torch.randn(3, 8)
    expected = function(x[:, :4]) * x[:, 4:] if gated else function(x)
    assert torch.equal(kind()(x), expected)


def test_fp8_activation_storage_is_refused():
    with pytest.raises(NotImplementedError, match="activation-func-fp8-input-store"):
        ops.SwiGLU(cache_quantized_input=True)


def test_a_sequence_of_operations_is_an_mlp_on_borrowed_parameters():
    norm, first, second = torch.nn.LayerNorm(4), torch.nn.Linear(4, 6), torch.nn.Linear(6, 4)
    sequence = ops.Sequential()
    for op, parameters in (
        (ops.LayerNorm(4, device="meta"), {"weight": norm.weight, "bias": norm.bias}),
        (ops.BasicLinear(4, 6, device="meta"), {"weight": first.weight}),
        (ops.Bias(6, device="meta"), {"bias": first.bias}),
        (ops.ReLU(), {}),
        (ops.BasicLinear(6, 4, device="meta"), {"weight": second.weight}),
        (ops.Bias(4, device="meta"), {"bias": second.bias}),
    ):
        for name, parameter in parameters.items():
            setattr(op, name, parameter)
        sequence.append(op)
    x = torch.randn(5, 4)
    torch.testing.assert_close(sequence(x), second(F.relu(first(norm(x)))), rtol=0, atol=1e-6)


@pytest.mark.parametrize("activation", sorted(ACTIVATIONS))
@pytest.mark.parametrize("normalization", ["LayerNorm", "RMSNorm"])
def test_layernorm_mlp_equals_its_parts(activation, normalization):
    torch.manual_seed(0)
    mlp = LayerNormMLP(4, 6, activation=activation, normalization=normalization)
    for parameter in mlp.parameters():
        torch.nn.init.normal_(parameter)
    x = torch.randn(5, 4)
    if normalization == "RMSNorm":
        normed = F.rms_norm(x, (4,), mlp.layer_norm_weight, 1e-5)
    else:
        normed = F.layer_norm(x, (4,), mlp.layer_norm_weight, mlp.layer_norm_bias, 1e-5)
    inner = ACTIVATIONS[activation]()(F.linear(normed, mlp.fc1_weight, mlp.fc1_bias))
    expected = F.linear(inner, mlp.fc2_weight, mlp.fc2_bias)
    torch.testing.assert_close(mlp(x), expected, rtol=0, atol=1e-5)
