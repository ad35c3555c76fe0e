"""What test_flash_attention.py runs in rank processes."""

from __future__ import annotations

from typing import Any

import torch

from mindspeed.model.transformer import set_attention_mask
from tests.support import gpt_ranks

ON = {"use_flash_attn": True}


def _configured(flags: dict[str, Any], function: Any) -> Any:
    import mindspeed
    from mindspeed import session

    mindspeed.configure(**flags)
    try:
        return function()
    finally:
        session.current().detach_features()


def _core_attention(spec: str, **overrides: Any) -> torch.nn.Module:
    """The core attention that a layer of the small model builds."""
    from megatron.core import parallel_state

    if not parallel_state.model_parallel_is_initialized():
        gpt_ranks.start(1)
    config = gpt_ranks.config("rmsnorm-swiglu-gqa", **overrides)
    return gpt_ranks.build(config, spec).decoder.layers[0].self_attention.core_attention


def _qkv(*shape: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    heads = (4, 2, 2)
    return [
        torch.randn(*shape, n, 8, generator=generator).to(dtype).requires_grad_() for n in heads
    ]


def bytes_kept_by_core_attention(mode: str) -> dict[str, int]:
    """Of the feature, and of Megatron's formula: scores, softmax, product."""
    from mindspeed.instruments.saved import saved_for_backward

    options = {"window": {"window_size": (40, 0)}, "sink": {"softmax_type": "learnable"}}
    module = _core_attention("te", **options.get(mode, {}))
    parameters = [p.data_ptr() for p in module.parameters()]
    kind = _mask_type("causal")

    def flash() -> int:
        q, k, v = _qkv(512, 1, dtype=torch.bfloat16)
        with saved_for_backward() as saved:
            module(q, k, v, None, attn_mask_type=kind).sum().backward()
        return saved.bytes

    def megatron() -> int:
        q, k, v = (x.permute(1, 2, 0, 3) for x in _qkv(512, 1, dtype=torch.bfloat16))
        k, v = (x.repeat_interleave(2, 1) for x in (k, v))
        with saved_for_backward() as saved:
            scores = (q @ k.transpose(-1, -2)).masked_fill(
                torch.ones(512, 512).triu(1).bool(), -1e4
            )
            (scores.softmax(-1) @ v).sum().backward()
        return saved.bytes

    sizes = sum(p.numel() * p.element_size() for p in module.parameters()) if parameters else 0
    return {"flash": _configured(ON, flash), "megatron": megatron(), "parameters": sizes}


def _mask_type(name: str) -> Any:
    from megatron.core.transformer.enums import AttnMaskType

    return AttnMaskType[name]


def packed(spec: str, padded: bool) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Output and gradients of documents of 3, 6 and 1 tokens, with and without the feature."""
    from megatron.core.packed_seq_params import PackedSeqParams

    module = _core_attention(spec)
    cu = torch.tensor([0, 3, 9, 10], dtype=torch.int32)
    starts = torch.tensor([0, 4, 12, 16], dtype=torch.int32) if padded else None
    params = PackedSeqParams(
        "thd", cu, cu, cu_seqlens_q_padded=starts, cu_seqlens_kv_padded=starts,
        max_seqlen_q=6, max_seqlen_kv=6,
    )  # fmt: skip

    def run() -> dict[str, torch.Tensor]:
        qkv = _qkv(16 if padded else 10)
        kind = _mask_type("padding_causal" if spec == "te" else "causal")
        out = module(*qkv, None, attn_mask_type=kind, packed_seq_params=params)
        weight = torch.linspace(-1, 2, out.numel()).view(out.shape)
        (out * weight).sum().backward()
        return {"out": out.detach(), **{n: x.grad for n, x in zip("qkv", qkv, strict=True)}}

    return _configured(ON, run), _configured({}, run)


def given_masks() -> dict[str, torch.Tensor]:
    """Outputs of the local spec under a mask that is not the causal one."""
    module = _core_attention("local")
    masked = torch.ones(1, 1, 16, 16, dtype=torch.bool).triu(1)
    masked[..., 9, :4] = True
    kind = _mask_type("causal")

    def run(mask: torch.Tensor | None) -> Any:
        return lambda: module(*_qkv(16, 1), mask, attn_mask_type=kind).detach()

    def shared() -> torch.Tensor:
        set_attention_mask(masked)
        try:
            return run(None)()
        finally:
            set_attention_mask(None)

    general = ON | {"attention_mask_type": "general"}
    return {
        "shared": _configured(general, shared),
        "without": _configured(ON, run(None)),
        "causal": _configured(ON, run(masked)),
        "general": _configured(general, run(masked)),
        "plain": _configured({}, run(masked)),
    }


def dropout() -> list[dict[str, torch.Tensor]]:
    """Gradients with dropout, once, with recomputed core attention, and with another seed."""
    from megatron.core import parallel_state, tensor_parallel

    if not parallel_state.model_parallel_is_initialized():
        gpt_ranks.start(1)

    def run(seed: int, **overrides: Any) -> Any:
        def train() -> dict[str, torch.Tensor]:
            config = gpt_ranks.config("rmsnorm-swiglu-gqa", attention_dropout=0.3, **overrides)
            model = gpt_ranks.build(config, "te")
            tensor_parallel.model_parallel_cuda_manual_seed(seed)
            return gpt_ranks.run(model)

        return _configured(ON, train)

    recompute = {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]}
    return [run(1), run(1, **recompute), run(2)]
