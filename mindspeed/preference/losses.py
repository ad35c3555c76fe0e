r"""Losses of preferences, by the log-probabilities of answers.

With :math:`c = \log\pi(y_c) - \log\pi_{ref}(y_c)`, the same of the rejected answer :math:`r`, and
:math:`\sigma` the logistic function:

=============  ==================================================================  ===============
``--loss-type``  loss of a pair                                                      in TRL
=============  ==================================================================  ===============
sigmoid        -(1-e) log s(b (c - r)) - e log s(b (r - c))                        DPO; e = 0
robust         ((1-e) (-log s(b (c-r))) + e log s(b (r-c))) / (1 - 2e)             DPO
hinge          max(0, 1 - b (c - r))                                               DPO
ipo            (c/\|c\| - r/\|r\| - 1/(2b))^2, by the numbers of their tokens          DPO
sigmoid_norm   -log s(b (c/\|c\| - r/\|r\|))                                           DPO
apo_zero       1 - s(b c) + s(b r)                                                 DPO
apo_down       s(b c) + 1 - s(b (c - r))                                           DPO
kto            of one answer: w (1 - s(+-b (c - kl)))                              KTO
orpo           -b log s(log odds of both) + mean loss of the chosen conversations  ORPO
simpo          -(1-e) log s(b (mean c - mean r) - g) - e log s(...)                CPO
=============  ==================================================================  ===============

``e`` is ``--label-smoothing``, ``b`` ``--beta``, ``g`` ``--simpo-gamma``. ORPO and SimPO need no
reference model, and have means over tokens for c and r. ``--sft-weight`` adds the mean loss of the
tokens of chosen answers to any of them (RPO; TRL's loss ``sft``, ``cpo_alpha``).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from mindspeed.preference.answers import Answers
from mindspeed.preference.options import LossType, PreferenceOptions

SMOOTHED = ("sigmoid", "robust", "simpo")
WITHOUT_REFERENCE = ("orpo", "simpo")


@dataclass(frozen=True)
class PreferenceLoss:
    """A loss and its numbers, as in TRL.

    Attributes:
        kind: one of :data:`mindspeed.preference.options.LossType`.
        beta: how far the model may move from the reference.
        label_smoothing: probability that a pair is the wrong way round.
        simpo_gamma: target margin of SimPO.
        sft_weight: of the mean loss of chosen answers.
        desirable_weight: of wanted answers, KTO.
        undesirable_weight: of unwanted answers, KTO.
    """

    kind: LossType = "sigmoid"
    beta: float = 0.1
    label_smoothing: float = 0.0
    simpo_gamma: float = 0.5
    sft_weight: float = 0.0
    desirable_weight: float = 1.0
    undesirable_weight: float = 1.0

    @classmethod
    def of(cls, options: PreferenceOptions) -> PreferenceLoss:
        """The loss that the flags of a run ask for."""
        return cls(
            options.loss_type,
            options.beta,
            options.label_smoothing,
            options.simpo_gamma,
            options.sft_weight,
            options.desirable_weight,
            options.undesirable_weight,
        )

    @property
    def needs_reference(self) -> bool:
        """Whether log-probabilities by the reference model are needed."""
        return self.kind not in WITHOUT_REFERENCE

    @property
    def unpaired(self) -> bool:
        """Whether records are judged answers."""
        return self.kind == "kto"


@dataclass(frozen=True)
class Totals:
    """Numbers of a whole step, by which its sums are divided; scalars.

    Attributes:
        pairs: pairs, or judged answers.
        tokens: of chosen answers.
        all_tokens: of chosen answers and their prompts.
    """

    pairs: torch.Tensor
    tokens: torch.Tensor
    all_tokens: torch.Tensor


Reports = dict[str, torch.Tensor]


def loss_of(
    loss: PreferenceLoss, answers: Answers, totals: Totals, kl: torch.Tensor | None = None
) -> tuple[torch.Tensor, Reports]:
    """The part of a micro-batch in the loss of a step.

    Args:
        loss: which one.
        answers: of the micro-batch.
        totals: of the step.
        kl: reference point of KTO (:func:`kl_term`), a scalar.

    Returns:
        The part, a scalar; and reports by TRL's names, each ``[2]``: a sum and its count.
    """
    real = answers.real
    with torch.no_grad():
        outside = ~real[:, None]
    safe = answers.tokens.clamp(min=1)
    chosen, rejected = _scores(loss, answers, safe, outside).unbind(1)
    if loss.unpaired:
        assert kl is not None
        each, reports = _kto(loss, answers, chosen, kl)
    else:
        each = _pair_losses(loss, chosen, rejected, safe)
        reports = _pair_reports(loss, answers, chosen, rejected)
    part = torch.where(real, each, 0).sum() / totals.pairs
    nll = -answers.logps[:, 0].sum()
    if loss.sft_weight:
        part = part + loss.sft_weight * nll / totals.tokens
        reports["nll_loss"] = torch.stack([nll, answers.tokens[:, 0].sum()])
    if loss.kind == "orpo":
        whole = -answers.all_logps[:, 0].sum()
        part = part + whole / totals.all_tokens
        reports["nll_loss"] = torch.stack([whole, answers.all_tokens[:, 0].sum()])
    return part, {name: pair.detach() for name, pair in reports.items()}


def _scores(
    loss: PreferenceLoss, answers: Answers, tokens: torch.Tensor, outside: torch.Tensor
) -> torch.Tensor:
    """``[pairs, 2]``: log-ratios to the reference, or means over tokens without one."""
    if loss.needs_reference:
        return answers.logps - answers.references
    # Any number below 0 where there is no pair: ORPO takes a logarithm.
    return (answers.logps / tokens).masked_fill(outside, -1.0)


def _pair_losses(
    loss: PreferenceLoss, chosen: torch.Tensor, rejected: torch.Tensor, tokens: torch.Tensor
) -> torch.Tensor:
    """The loss of each pair by its scores ``[pairs]``, and the tokens ``[pairs, 2]``."""
    beta, smoothing = loss.beta, loss.label_smoothing
    margin = beta * (chosen - rejected)
    match loss.kind:
        case "sigmoid":
            return _smoothed(margin, smoothing)
        case "robust":
            kept, flipped = (
                (1 - smoothing) * F.logsigmoid(margin),
                smoothing * F.logsigmoid(-margin),
            )
            return (flipped - kept) / (1 - 2 * smoothing)
        case "hinge":
            return torch.relu(1 - margin)
        case "ipo":
            return (chosen / tokens[:, 0] - rejected / tokens[:, 1] - 1 / (2 * beta)) ** 2
        case "sigmoid_norm":
            return -F.logsigmoid(beta * (chosen / tokens[:, 0] - rejected / tokens[:, 1]))
        case "apo_zero":
            return 1 - torch.sigmoid(beta * chosen) + torch.sigmoid(beta * rejected)
        case "apo_down":
            return torch.sigmoid(beta * chosen) + 1 - torch.sigmoid(margin)
        case "simpo":
            return _smoothed(margin - loss.simpo_gamma, smoothing)
        case _:
            return -beta * F.logsigmoid(_log_odds(chosen, rejected))


def _smoothed(margin: torch.Tensor, smoothing: float) -> torch.Tensor:
    return -F.logsigmoid(margin) * (1 - smoothing) - F.logsigmoid(-margin) * smoothing


def _log_odds(chosen: torch.Tensor, rejected: torch.Tensor) -> torch.Tensor:
    """Logarithm of the ratio of the odds of two answers, by their mean log-probabilities."""
    return (chosen - rejected) - (_log1mexp(chosen) - _log1mexp(rejected))


def _log1mexp(x: torch.Tensor) -> torch.Tensor:
    """``log(1 - exp(x))`` for x < 0, without cancellation on either side of ``-log 2``."""
    far = x < -math.log(2)  # each branch gets what it is good for: no infinite gradients
    return torch.where(
        far,
        torch.log1p(-torch.exp(torch.where(far, x, -1.0))),
        torch.log(-torch.expm1(torch.where(far, -0.5, x))),
    )


def _pair_reports(
    loss: PreferenceLoss, answers: Answers, chosen: torch.Tensor, rejected: torch.Tensor
) -> Reports:
    real = answers.real
    count = real.sum().to(chosen.dtype)
    good, bad = loss.beta * chosen, loss.beta * rejected
    logps = answers.logps if loss.needs_reference else torch.stack([chosen, rejected], 1)
    found = {
        "rewards/chosen": good,
        "rewards/rejected": bad,
        "rewards/accuracies": (good > bad).to(chosen.dtype),
        "rewards/margins": good - bad,
        "logps/chosen": logps[:, 0],
        "logps/rejected": logps[:, 1],
    }
    if loss.kind == "orpo":
        odds = _log_odds(chosen, rejected)
        found |= {"log_odds_chosen": odds, "log_odds_ratio": F.logsigmoid(odds)}
    return {
        name: torch.stack([torch.where(real, value, 0).sum(), count])
        for name, value in found.items()
    }


def _kto(
    loss: PreferenceLoss, answers: Answers, ratio: torch.Tensor, kl: torch.Tensor
) -> tuple[torch.Tensor, Reports]:
    """The loss of each judged answer by its log-ratio ``[answers]``."""
    wanted = answers.values > 0
    good = loss.desirable_weight * (1 - torch.sigmoid(loss.beta * (ratio - kl)))
    bad = loss.undesirable_weight * (1 - torch.sigmoid(loss.beta * (kl - ratio)))
    reports = {"kl": torch.stack([kl, torch.ones_like(kl)])}
    for name, chosen in (("chosen", wanted), ("rejected", ~wanted)):
        here = answers.real & chosen
        count = here.sum().to(ratio.dtype)
        for kind, value in (("rewards", loss.beta * ratio), ("logps", answers.logps[:, 0])):
            reports[f"{kind}/{name}"] = torch.stack([torch.where(here, value, 0).sum(), count])
    return torch.where(wanted, good, bad), reports


def kl_term(answers: Answers) -> torch.Tensor:
    """Log-ratios of answers to other prompts, and how many: ``[2]``. Their mean is KTO's point."""
    ratios = torch.where(answers.real, answers.logps[:, 1] - answers.references[:, 1], 0)
    return torch.stack([ratios.sum(), answers.real.sum().to(ratios.dtype)]).detach()


def reward_loss(
    rewards: torch.Tensor,
    margins: torch.Tensor,
    real: torch.Tensor,
    pairs: torch.Tensor,
    center: float,
) -> tuple[torch.Tensor, Reports]:
    """The part of a micro-batch in the loss of a reward model (Bradley-Terry).

    Args:
        rewards: ``[pairs, 2]`` of the chosen and the rejected answers.
        margins: ``[pairs]``, by which the chosen ones are to be better.
        real: ``[pairs]``, bool: there is such a pair.
        pairs: of the whole step, a scalar.
        center: weight of the squares of the pairs' sums, which keep rewards around 0.

    Returns:
        The part, a scalar; and reports by TRL's names, each ``[2]``: a sum and its count.
    """
    chosen, rejected = rewards.unbind(1)
    each = -F.logsigmoid(chosen - rejected - margins) + center * (chosen + rejected) ** 2
    count = real.sum().to(rewards.dtype)
    found = {
        "mean_reward": (chosen + rejected) / 2,
        "accuracy": (chosen > rejected).to(rewards.dtype),
        "margin": chosen - rejected,
    }
    reports = {
        name: torch.stack([torch.where(real, value, 0).sum(), count]).detach()
        for name, value in found.items()
    }
    return torch.where(real, each, 0).sum() / pairs, reports
