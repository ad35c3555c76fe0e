"""Arguments of a wrong type are refused with the name of the argument."""

from __future__ import annotations

import inspect

import pytest
import torch

from mindspeed.ops import OperatorError
from mindspeed.ops._check import ArgumentCheck
from mindspeed.ops.ffn import npu_ffn
from mindspeed.ops.fusion_attention_v2 import npu_fusion_attention
from mindspeed.ops.gmm import npu_gmm, npu_gmm_v2
from mindspeed.ops.npu_groupmatmul_add import npu_groupmatmul_add_fp32
from mindspeed.ops.npu_moe_token_permute import npu_moe_token_permute
from mindspeed.ops.npu_moe_token_unpermute import npu_moe_token_unpermute
from mindspeed.ops.rms_norm import rms_norm
from mindspeed.ops.scaled_masked_softmax import scaled_masked_softmax
from mindspeed.ops.swiglu import swiglu

X = torch.ones(5, 6)
Q = torch.ones(1, 2, 5, 8)
INDICES = torch.zeros(5, 1, dtype=torch.int64)


def attend(**changes):
    given = {"query": Q, "key": Q, "value": Q, "head_num": 2, "input_layout": "BNSD"}
    npu_fusion_attention(**{**given, **changes})


def feed_forward(x=X, **more):
    npu_ffn(x, torch.ones(6, 8), torch.ones(8, 3), "gelu", **more)


def in_int8(**changes):
    x, w1, w2 = (torch.ones(s, dtype=torch.int8) for s in ((5, 6), (6, 8), (8, 3)))
    scales = {"scale": torch.ones(1), "deq_scale1": torch.ones(8), "deq_scale2": torch.ones(3)}
    npu_ffn(x, w1, w2, "relu", **{**scales, **changes})


CALLS = {
    "x: expected a tensor, got None": lambda: rms_norm(None, torch.ones(6)),
    "gamma: expected a tensor, got None": lambda: rms_norm(X, None),
    "epsilon: expected a number, got None": lambda: rms_norm(X, torch.ones(6), None),
    "x: expected a strided tensor": lambda: rms_norm(X.to_sparse(), torch.ones(6)),
    "scale: expected a number, got nan": lambda: attend(scale=float("nan")),
    "head_num: expected a whole number": lambda: attend(head_num=2.0),
    "pre_tokens: expected a whole number": lambda: attend(pre_tokens=None),
    "q_start_idx: expected a list of one number": lambda: attend(q_start_idx=[1, 2]),
    "pse: expected a tensor": lambda: attend(pse="alibi"),
    "pse: expected the device of query, cpu, got meta": lambda: attend(
        pse=torch.ones(1, 2, 5, 5, device="meta")
    ),
    "value: expected a head size of at most 8, got 0": lambda: attend(value=Q[..., :0]),
    "x: expected a tensor, got None ": lambda: feed_forward(None),
    "x: expected at least 1 dimension": lambda: feed_forward(torch.ones(())),
    "bias1: expected dtype": lambda: feed_forward(bias1=torch.ones(8, dtype=torch.complex64)),
    "offset: expected shape": lambda: in_int8(offset=torch.ones(2)),
    "deq_scale1: expected dtype": lambda: in_int8(deq_scale1=torch.ones(8, dtype=torch.bool)),
    "grad: expected a tensor": lambda: npu_groupmatmul_add_fp32(X, X, torch.tensor([5]), None),
    "num_out_tokens: expected a whole number": lambda: npu_moe_token_permute(X, INDICES, 1.5),
    "restore_shape: expected": lambda: npu_moe_token_unpermute(
        X, torch.arange(5, dtype=torch.int32), restore_shape=5
    ),
    "scale: expected a number, got 'two'": lambda: scaled_masked_softmax(Q, None, "two"),
}


@pytest.mark.parametrize("message", CALLS)
def test_one_message_names_the_argument(message):
    with pytest.raises(OperatorError, match=message.strip()):
        CALLS[message]()


def test_a_tensor_is_refused_as_an_option():
    with pytest.raises(OperatorError, match="mode: expected one of 0, 1, got a tensor of shape"):
        ArgumentCheck("op").choice((0, 1), mode=torch.ones(2))


def test_a_feed_forward_network_with_empty_input():
    assert npu_ffn(X[:0], torch.ones(6, 8), torch.ones(8, 3), "gelu").shape == (0, 3)
    assert npu_ffn(X[0], torch.ones(6, 8), torch.ones(8, 3), "gelu").shape == (3,)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((None,), "x: expected a tensor"),
        ((torch.zeros(4, 0),), "an even size of dimension 1"),
        ((torch.zeros(4, 2), "last"), "dim: expected a whole number"),
    ],
)
def test_swiglu_names_invalid_arguments(arguments, message):
    with pytest.raises(OperatorError, match=message):
        swiglu(*arguments)


def test_twins_have_names_and_signatures_of_their_own():
    for function, name in ((npu_gmm, "npu_gmm"), (npu_gmm_v2, "npu_gmm_v2")):
        assert function.__name__ == name
        assert list(inspect.signature(function).parameters)[:3] == ["x", "weight", "bias"]
        with pytest.raises(OperatorError, match=f"^mindspeed.ops.{name}: x: expected 2 dimensions"):
            function(torch.ones(2), torch.ones(1, 2, 2))
