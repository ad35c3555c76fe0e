"""Options of adapters on one layer: dropout, the first values, the scale."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from tests.support.lazy import needs

needs("megatron.core")

from mindspeed.lora import LoraConfig
from mindspeed.lora.drawing import draw
from mindspeed.lora.linear import AdapterOptions, TPShard, give_adapter
from mindspeed.te.linear import Linear

ALONE = TPShard(None, None, False)


def layer(inputs=64, outputs=48, dtype=torch.float64, **options):
    """A linear layer with a random adapter, and its matrices."""
    config = LoraConfig(("dense",), **{"r": 4, "alpha": 8.0, **options})
    module = Linear(inputs, outputs, bias=False, params_dtype=dtype, device="cpu")
    module.weight.requires_grad_(False)
    options = AdapterOptions.of(
        config, ALONE, {"all": outputs}, None, type(module), "linear", {"all"}
    )
    give_adapter(module, options)
    draw("decoder.layers.0.self_attention.linear_proj", module)
    return module, module.lora_A["all"], module.lora_B["all"]


@pytest.mark.parametrize(("use_rslora", "scale"), [(False, 2.0), (True, 4.0)])
def test_dropout_is_on_the_input_of_a_in_training_only(use_rslora, scale):
    module, a, b = layer(dropout=0.25, use_rslora=use_rslora)
    torch.nn.init.normal_(b)
    x = torch.randn(5, 2, 64, dtype=torch.float64, requires_grad=True)
    grad = torch.randn(5, 2, 48, dtype=torch.float64)

    def gradients(out):
        return torch.autograd.grad(out, (x, a, b), grad)

    def formula(dropped):
        return F.linear(x, module.weight) + scale * F.linear(
            F.linear(dropped, a.double()), b.double()
        )

    torch.manual_seed(3)
    keep = F.dropout(torch.ones_like(x), 0.25)
    torch.manual_seed(3)
    ours, theirs = module.train()(x), formula(x * keep)
    torch.testing.assert_close(ours, theirs)
    torch.testing.assert_close(gradients(ours), gradients(theirs))
    assert (ours - formula(x)).abs().max() > 0.1
    torch.testing.assert_close(module.eval()(x), formula(x))


@pytest.mark.parametrize("init", ["kaiming", "gaussian"])
def test_initial_adapter_values_are_seeded_by_name_and_have_no_effect(init):
    module, a, b = layer(inputs=4096, init=init)
    deviation = 1 / 4 if init == "gaussian" else (3 * 4096) ** -0.5
    assert a.std().item() == pytest.approx(deviation, rel=0.02)
    assert a.mean().abs().item() < 0.03 * deviation
    assert not b.any()
    again = layer(inputs=4096, init=init)[1]
    assert torch.equal(a, again)
    draw("decoder.layers.1.self_attention.linear_proj", module)
    assert not torch.equal(a, again)
    x = torch.randn(3, 1, 4096, dtype=torch.float64)
    assert torch.equal(module(x), F.linear(x, module.weight))
