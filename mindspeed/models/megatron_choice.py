"""Choice of the experts of a token, where Megatron Core chooses in another way.

=============================  =============================================  ===========
``--moe-group-score-experts``  a group's score is the sum of its best N       DeepSeek-V2
``--moe-softmax-choice-bias``  a bias on softmax scores, for the choice only  ERNIE 4.5
=============================  =============================================  ===========

Megatron has groups whose score is the sum of their best ``topk / groups chosen`` experts, and a
bias for sigmoid scores. Its routers ask ``router_replay`` for their choice where there is one;
these classes answer, and scores, probabilities, losses and dispatch stay Megatron's.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from mindspeed import device as devices
from mindspeed.errors import ConfigError
from mindspeed.models.extra_flags import ModelExtras
from mindspeed.models.model_config import ModelConfig


def problems(model: ModelConfig, *, fused_router: bool) -> Iterator[str]:
    """Flags that a choice of ours has no effect without, or would go past."""
    name = _flag(model)
    if name is None:
        return
    if not model.num_experts:
        yield f"{name} has no effect without --num-experts: drop it"
    elif fused_router or "sinkhorn" in str(model.moe_router_load_balancing_type):
        yield f"{name} chooses itself: drop --moe-router-fusion and sinkhorn balancing"
    elif model.moe_group_score_experts and not model.moe_router_group_topk:
        yield f"{name} has no effect without --moe-router-group-topk: add it, or drop both"
    elif model.moe_group_score_experts and model.moe_softmax_choice_bias:
        yield "--moe-softmax-choice-bias knows no groups: drop --moe-group-score-experts"
    elif model.moe_softmax_choice_bias and (
        model.moe_router_score_function != "softmax" or model.moe_router_pre_softmax
    ):
        yield (
            "--moe-softmax-choice-bias needs --moe-router-score-function softmax without "
            "--moe-router-pre-softmax: sigmoid scores have --moe-router-enable-expert-bias"
        )


def change_routers(extras: ModelExtras, layers: Iterable[Any]) -> None:
    """Let the routers of built layers choose as the flags say.

    Raises:
        ConfigError: This release of Megatron asks nobody.
    """
    name = _flag(extras)
    if name is None:
        return
    for layer in layers:
        router = getattr(layer.mlp, "router", None)
        if router is None:
            continue
        if not hasattr(router, "router_replay"):
            raise ConfigError(f"{name} needs megatron-core 0.16 or newer")
        if extras.moe_group_score_experts:
            router.router_replay = BestOfGroups(extras.moe_group_score_experts)
        else:
            router.router_replay = Biased(_bias_of(router))


def _flag(extras: ModelExtras) -> str | None:
    names = ("moe_group_score_experts", "moe_softmax_choice_bias")
    given = [name for name in names if getattr(extras, name)]
    return f"--{given[0].replace('_', '-')}" if given else None


def _bias_of(router: Any) -> Any:
    """The router, with a buffer in the place of the bias that Megatron leaves out."""
    del router.expert_bias
    device = torch.device("cpu")
    if not router.config.use_cpu_initialization:
        device = devices.current().torch_device()
    zeros = torch.zeros(1, router.config.num_moe_experts, dtype=torch.float32, device=device)
    router.register_buffer("expert_bias", zeros)
    return router


class BestOfGroups:
    """Top-k among the experts of the best groups.

    Args:
        counted: Experts of a group whose scores add up to the group's.
    """

    def __init__(self, counted: int) -> None:
        self.counted = counted

    def get_replay_topk(
        self,
        scores: Tensor,
        topk: int,
        num_groups: Any = None,
        group_topk: Any = None,
        *unused: Any,
    ) -> tuple[Tensor, Tensor]:
        """Scores ``[t, k]`` and numbers of the chosen experts.

        Args:
            scores: ``[t, experts]``.
            topk: Experts to choose.
            num_groups: Groups of neighbouring experts.
            group_topk: Groups to choose from.
            *unused: Megatron's own choice.
        """
        grouped = scores.view(scores.shape[0], num_groups, -1)
        best = grouped.topk(self.counted, dim=-1).values.sum(-1).topk(group_topk, dim=-1).indices
        allowed = torch.zeros_like(grouped[..., 0], dtype=torch.bool).scatter(1, best, True)
        masked = grouped.masked_fill(~allowed[..., None], float("-inf")).flatten(1)
        return masked.topk(topk, dim=-1)  # type: ignore[return-value]


class Biased:
    """Top-k of softmax scores plus a bias, which is kept as it was loaded.

    Args:
        router: Holds the bias, ``expert_bias`` in fp32, ``[1, experts]``.
    """

    def __init__(self, router: Any) -> None:
        self.bias = lambda: router.expert_bias

    def get_replay_topk(self, logits: Tensor, topk: int, *unused: Any) -> tuple[Tensor, Tensor]:
        """Logits ``[t, k]`` and numbers of the chosen experts.

        Their softmax is the softmax over all experts, renormalised.

        Args:
            logits: ``[t, experts]``.
            topk: Experts to choose.
            *unused: Groups, which such routers do not have, and Megatron's own choice.
        """
        chosen = (logits.float().softmax(-1) + self.bias()).topk(topk, dim=-1).indices
        return logits.gather(1, chosen), chosen
