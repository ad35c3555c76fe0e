"""The head of a reward model: one number for each token, in place of Megatron's output layer.

    score = h w        h [s, b, hidden], w [1, hidden]

The weight is the same on all tensor-parallel ranks. With sequence parallelism each scores its part
of the tokens, and the scores are gathered: ``4 s b`` bytes; Megatron sums the gradients of such
weights over the ranks.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer import TransformerConfig

NAME = "score.weight"


class ScoreHead(torch.nn.Module):
    """Takes the place of ``GPTModel.output_layer``.

    Args:
        config: of the model.
        seed: of the initial weight, which has standard deviation 0.02, as in transformers.
    """

    def __init__(self, config: TransformerConfig, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        weight = torch.empty(1, config.hidden_size).normal_(std=0.02, generator=generator)
        self.weight = torch.nn.Parameter(weight.to(config.params_dtype))
        self._gathers = config.sequence_parallel
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: torch.Tensor, *_: Any, **__: Any) -> tuple[torch.Tensor, None]:
        """Scores of tokens.

        Args:
            x: ``[s, b, hidden]``, under sequence parallelism ``[s / tp, b, hidden]``.

        Returns:
            ``[s, b, 1]``, and no bias.
        """
        scores = F.linear(x, self.weight)
        if self._gathers:
            scores = gather_from_sequence_parallel_region(scores, tensor_parallel_output_grad=False)
        return scores, None

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None
    ) -> dict[str, ShardedTensor]:
        """The weight under the name that Hugging Face has for it."""
        replicas = parallel_state.get_data_parallel_rank(with_context_parallel=True)
        tp_rank = parallel_state.get_tensor_model_parallel_rank()
        return {
            f"{prefix}weight": ShardedTensor.from_rank_offsets(
                NAME, self.weight, replica_id=(0, tp_rank, replicas)
            )
        }
