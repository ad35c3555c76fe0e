"""What attention saves for backward: v, not the whole output of the qkv projection."""

from __future__ import annotations

import pytest
import torch

from mindspeed.device.torch_versions import cpu_attention_groups_heads
from mindspeed.te.attention import own_value
from tests.support import gpt_ranks
from tests.support.lazy import needs
from tests.te import saved_ranks

needs("megatron.core")

ROW = 4 * gpt_ranks.SEQUENCE * gpt_ranks.BATCH  # bytes of one fp32 channel
LAYERS, HEAD = 2, 8
CASES = {  # channels of q and k, which are freed, of every layer
    # Values that are repeated for the kernel are copies anyway.
    "rmsnorm-swiglu-gqa": (4 + 2) * HEAD if cpu_attention_groups_heads() else 0,
    "layernorm-gelu-bias": (4 + 4) * HEAD,
    "qk-layernorm": 0,  # the norms keep their inputs
    "mla": 0,  # Megatron copies the values itself
}


@pytest.mark.parametrize("spec", ["te", "local"])
@pytest.mark.parametrize("name", CASES)
def test_the_output_of_the_qkv_projection_is_freed(ranks, name, spec):
    (found,) = ranks(1, saved_ranks.kept, name, spec, setup="tests.support.warm", timeout=240)
    assert found["view"] - found["own"] == LAYERS * ROW * CASES[name]
    assert found["equal"]


def test_v_is_copied_only_if_that_frees_memory():
    fused = torch.randn(4, 2, 3, 8, requires_grad=True).sin()
    q, k, v = fused.unbind(2)
    assert own_value(q, k, v, None) is v, "q and k hold the projection anyway"
    assert own_value(q.cos(), k, v, None) is v
    own = own_value(q.cos(), k.cos(), v, None)
    assert own.is_contiguous()
    assert own.untyped_storage().nbytes() == v.numel() * 4
    assert torch.equal(own, v)
    alone = v.clone()
    assert own_value(q.cos(), k.cos(), alone, None) is alone
    with torch.no_grad():
        assert own_value(q.cos(), k.cos(), v, None) is v
    frozen = [x.detach() for x in (q.cos(), k.cos(), v)]
    assert own_value(*frozen, None) is frozen[2]
