"""ALiBi: ``--position-embedding-type alibi``.

A slope per head times the distance of query and key is taken from the scores; there are no position
embeddings. Every rank knows the slopes of its own heads and the positions of its tokens, so it goes
with tensor, pipeline and context parallelism by every algorithm, with packed documents and
recomputation. Kernels make the bias from the slopes, 4 bytes per head instead of a matrix.

``--alibi-fusion-attn-type`` is the original's: 2 is the above with ``--use-flash-attn`` on, 0 makes
the bias a tensor, 3 takes the square root of distances (also a tensor). ``--square-alibi-mask``,
``--fill-neg-inf`` and ``--alibi-diagonal-opposite`` change nothing under a causal mask, and a
decoder has no other.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from mindspeed.features.feature import Feature, Megatron, Problem, conflict, option_of
from mindspeed.flags import flag
from mindspeed.ranges import Range

if TYPE_CHECKING:
    import torch

    from mindspeed.adaptor.seams import Seams
    from mindspeed.te.masks import Visibility

_TENSOR, _IN_KERNEL, _ROOT = 0, 2, 3


class Alibi(Feature, level=0, seams=("kernels",), after=("flash-attention", "triangle-attention")):
    """Linear biases on attention scores instead of position embeddings."""

    position_embedding_type: str = flag(
        "learned_absolute", "how positions enter the model", megatron=True, adds=("alibi",)
    )
    alibi_fusion_attn_type: int | None = flag(
        None,
        "0: the bias is a tensor; 2: kernels make it from slopes; 3: of square roots",
        range=Range(0, 3),
    )
    square_alibi_mask: bool = flag(False, "without effect: the same under a causal mask")
    fill_neg_inf: bool = flag(False, "without effect: what is hidden is -inf in any case")
    alibi_diagonal_opposite: bool = flag(False, "without effect: the same under a causal mask")

    def enabled(self, megatron: Megatron) -> bool:
        return self.position_embedding_type == "alibi"

    def problems(self, megatron: Megatron) -> Iterator[Problem]:
        name, kind = "--position-embedding-type alibi", self.alibi_fusion_attn_type
        if kind not in (None, _TENSOR, _IN_KERNEL, _ROOT):
            yield Problem("--alibi-fusion-attn-type", f"{kind} is not one of 0, 2, 3", "use 2")
        for option in ("use_rotary_position_embeddings", "use_fused_rotary_pos_emb"):
            if megatron.get(option):
                yield conflict(option_of(option), name)
        if megatron.get("multi_latent_attention"):
            yield Problem(name, "latent attention has rotary positions", "remove one")
        if kind in (_TENSOR, _ROOT) and megatron.get("context_parallel_size", 1) > 1:
            yield Problem(
                "--alibi-fusion-attn-type",
                f"{kind} makes a bias of the whole sequence, which is split by "
                f"--context-parallel-size {megatron['context_parallel_size']}",
                "use 2",
            )

    def attach(self, seams: Seams, megatron: Megatron) -> None:
        import torch

        from mindspeed.attention.alibi import alibi_bias, alibi_slopes
        from mindspeed.te import kernels

        def slopes_of(
            all_heads: int, first: int, heads: int, device: torch.device
        ) -> torch.Tensor | None:
            slopes = alibi_slopes(all_heads)[first : first + heads]
            return torch.tensor(slopes, dtype=torch.float32, device=device)

        seams.use_kernels(owner=self.name, alibi_slopes=slopes_of)
        if self.alibi_fusion_attn_type not in (_TENSOR, _ROOT):
            return
        root, by_bias = self.alibi_fusion_attn_type == _ROOT, kernels.attend

        def attend(
            q: torch.Tensor,
            k: torch.Tensor,
            v: torch.Tensor,
            seen: Visibility,
            *,
            bias: torch.Tensor | None = None,
            slopes: torch.Tensor | None = None,
            **more: Any,
        ) -> torch.Tensor:
            if slopes is not None:
                linear = alibi_bias(slopes, q.shape[2], k.shape[2], root)
                bias = linear if bias is None else bias + linear
            return by_bias(q, k, v, seen, bias=bias, **more)

        seams.use_kernels(owner=self.name, attend=attend)
