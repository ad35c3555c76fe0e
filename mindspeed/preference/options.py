"""Flags of training on pairs of answers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from mindspeed.flags import flag
from mindspeed.ranges import ABOVE_ZERO, NOT_NEGATIVE, Range

LossType = Literal[
    "sigmoid",
    "robust",
    "hinge",
    "ipo",
    "sigmoid_norm",
    "apo_zero",
    "apo_down",
    "kto",
    "orpo",
    "simpo",
]


@dataclass(frozen=True)
class PreferenceOptions:
    """Training on pairs of answers: ``mindspeed dpo`` and ``mindspeed reward``."""

    objective: Literal["next_token", "preference", "reward"] = flag(
        "next_token", "what is trained; mindspeed dpo and mindspeed reward set it"
    )
    loss_type: LossType = flag(  # noqa: RUF009  (a Literal)
        "sigmoid", "loss of preferences; sigmoid is DPO, kto reads judged answers"
    )
    beta: float = flag(
        0.1, "how strongly preferences keep the model near its reference", range=ABOVE_ZERO
    )
    label_smoothing: float = flag(
        0.0, "probability that a pair is the wrong way round", range=Range(0, 0.5, below=True)
    )
    simpo_gamma: float = flag(0.5, "--loss-type simpo: target margin", range=NOT_NEGATIVE)
    sft_weight: float = flag(
        0.0, "add this times the mean loss of the chosen answers' tokens", range=NOT_NEGATIVE
    )
    desirable_weight: float = flag(1.0, "--loss-type kto: of wanted answers", range=NOT_NEGATIVE)
    undesirable_weight: float = flag(
        1.0, "--loss-type kto: of unwanted answers", range=NOT_NEGATIVE
    )
    reference_load: str | None = flag(
        None, "reference model (default: that of --load; with adapters the model without them)"
    )
    precompute_reference: bool = flag(
        False, "compute the reference's log-probabilities once, before training, and keep them"
    )
    center_rewards_coefficient: float = flag(
        0.0, "mindspeed reward: add this times the square of the sum of rewards", range=NOT_NEGATIVE
    )
