"""Losses, rewards and gradients are those of TRL's own functions, in fp64."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("trl")

from mindspeed.preference.answers import answers_of, most_answers
from mindspeed.preference.losses import PreferenceLoss, Totals, kl_term, loss_of
from tests.support.lazy import Lazy

dpo_trainer = Lazy("trl.trainer.dpo_trainer")
kto_trainer = Lazy("trl.trainer.kto_trainer")
orpo_trainer = Lazy("trl.experimental.orpo.orpo_trainer")
cpo_trainer = Lazy("trl.experimental.cpo.cpo_trainer")

PAIRS, LENGTH = 5, 12
ACCELERATOR = SimpleNamespace(
    device="cpu",
    gather=lambda x: x,
    gather_for_metrics=lambda x: x,
    unwrap_model=lambda x: x,
)


@pytest.fixture
def batch() -> dict[str, torch.Tensor]:
    """Log-probabilities of next tokens of pairs: rows are chosen, rejected, chosen, ..."""
    generator = torch.Generator().manual_seed(3)
    rows = 2 * PAIRS
    prompts = torch.randint(1, 5, (PAIRS,), generator=generator).repeat_interleave(2)
    answers = torch.randint(1, LENGTH - 5, (rows,), generator=generator)
    place = torch.arange(LENGTH)
    logps = -3 * torch.rand(rows, LENGTH, generator=generator, dtype=torch.float64)
    inside = place < (prompts + answers)[:, None]
    mask = inside & (place >= prompts[:, None])
    first = place == 0
    references = -9 * torch.rand(rows, 1, generator=generator, dtype=torch.float64) * first
    wanted = torch.tensor([1, 0, 0, 1, 1], dtype=torch.float64).repeat_interleave(2)
    return {
        "logps": logps.requires_grad_(),
        "loss_mask": mask.double(),
        "answers": inside * (torch.arange(rows) + 1)[:, None],
        "values": wanted[:, None] * first,
        "references": references,
    }


def ours(loss: PreferenceLoss, batch: dict[str, torch.Tensor]) -> dict[str, Any]:
    """Loss, means of reports, and the gradient of the log-probabilities."""
    answers = answers_of(**batch)
    assert len(answers.values) * 2 == most_answers(batch["answers"].numel())
    chosen = answers.real
    totals = Totals(chosen.sum(), answers.tokens[:, 0].sum(), answers.all_tokens[:, 0].sum())
    kl = None
    if loss.unpaired:
        total, count = kl_term(answers)
        kl = (total / count).clamp(min=0)
    value, reports = loss_of(loss, answers, totals, kl)
    (gradient,) = torch.autograd.grad(value, batch["logps"])
    means = {name: (pair[0] / pair[1]).item() for name, pair in reports.items()}
    return {"loss": value.item(), "gradient": gradient, **means}


def in_halves(x: torch.Tensor) -> torch.Tensor:
    """Chosen rows, then rejected rows, as TRL has them."""
    return torch.cat([x[::2], x[1::2]])


def outputs_of(logps: torch.Tensor) -> SimpleNamespace:
    zeros = torch.zeros_like(logps)
    return SimpleNamespace(
        log_probs=logps, entropy=zeros, mean_logits=zeros, is_top1=zeros.bool(), aux_loss=None
    )


class Metrics(dict):
    def __missing__(self, key: str) -> list:
        self[key] = []
        return self[key]


def model(logps: torch.Tensor, mask: torch.Tensor) -> Any:
    """A model whose log-probabilities are known: 0 outside of answers, as TRL's are."""
    return lambda **_: outputs_of(logps * mask)


def trainer(metrics: Metrics, **options: Any) -> SimpleNamespace:
    """What TRL's losses read of a trainer."""
    return SimpleNamespace(
        model=SimpleNamespace(training=True),
        accelerator=ACCELERATOR,
        aux_loss_enabled=False,
        precompute_ref_logps=True,
        _metrics={"train": metrics},
        _total_train_tokens=0,
        _tp_size=1,
        **options,
    )


def trl_dpo(loss: PreferenceLoss, batch: dict[str, torch.Tensor]) -> dict[str, Any]:
    metrics = Metrics()
    mask, references = in_halves(batch["loss_mask"]), in_halves(batch["references"])[:, 0]
    given = trainer(
        metrics,
        ld_alpha=None,
        f_divergence_type="reverse_kl",
        loss_types=[loss.kind, *(["sft"] if loss.sft_weight else [])],
        loss_weights=[1.0, *([loss.sft_weight] if loss.sft_weight else [])],
        beta=loss.beta,
        label_smoothing=loss.label_smoothing,
        use_weighting=False,
    )
    whole = torch.cat([torch.zeros(2 * PAIRS, 1), mask], 1).long()  # a token before the first
    inputs = {
        "input_ids": torch.zeros_like(whole),
        "attention_mask": torch.ones_like(whole),
        "completion_mask": whole,
        "ref_chosen_logps": references[:PAIRS],
        "ref_rejected_logps": references[PAIRS:],
    }
    compute = dpo_trainer.DPOTrainer._compute_loss
    value = compute(given, model(in_halves(batch["logps"]), mask), inputs, False)
    return result(value, batch, metrics)


def trl_kto(loss: PreferenceLoss, batch: dict[str, torch.Tensor]) -> dict[str, Any]:
    metrics = Metrics()
    mask, logps = batch["loss_mask"], batch["logps"]
    other = (logps[1::2] * mask[1::2]).sum(1).detach()
    given = trainer(
        metrics,
        calculate_KL=True,
        loss_type="kto",
        beta=loss.beta,
        desirable_weight=loss.desirable_weight,
        undesirable_weight=loss.undesirable_weight,
        _compute_kl_logps=lambda *_: other,
    )
    whole = torch.cat([torch.zeros(PAIRS, 1), mask[::2]], 1).long()
    inputs = {
        "input_ids": torch.zeros_like(whole),
        "attention_mask": torch.ones_like(whole),
        "completion_mask": whole,
        "label": batch["values"][::2, 0] > 0,
        "ref_logps": batch["references"][::2, 0],
        "ref_KL_logps": batch["references"][1::2, 0],
    }
    compute = kto_trainer.KTOTrainer._compute_loss
    value = compute(given, model(logps[::2], mask[::2]), inputs, False)
    return result(value, batch, metrics)


def trl_orpo(loss: PreferenceLoss, batch: dict[str, torch.Tensor]) -> dict[str, Any]:
    mask, inside = batch["loss_mask"], (batch["answers"] > 0).double()
    mean = (batch["logps"] * mask).sum(1) / mask.sum(1)
    trainer = SimpleNamespace(beta=loss.beta, accelerator=ACCELERATOR)
    odds_ratio_loss = orpo_trainer.ORPOTrainer.odds_ratio_loss
    losses, good, bad, ratio, odds = odds_ratio_loss(trainer, mean[::2], mean[1::2])
    whole = -(batch["logps"] * inside)[::2].sum() / inside[::2].sum()
    metrics = rewards(good, bad) | {
        "nll_loss": [whole.item()],
        "log_odds_ratio": [ratio.item()],
        "log_odds_chosen": [odds.item()],
    }
    return result(whole - losses.mean(), batch, metrics)


def trl_simpo(loss: PreferenceLoss, batch: dict[str, torch.Tensor]) -> dict[str, Any]:
    mask = batch["loss_mask"]
    mean = (batch["logps"] * mask).sum(1) / mask.sum(1)
    trainer = SimpleNamespace(
        alpha=0.0,
        loss_type="simpo",
        beta=loss.beta,
        label_smoothing=loss.label_smoothing,
        simpo_gamma=loss.simpo_gamma,
        accelerator=ACCELERATOR,
    )
    losses, good, bad = cpo_trainer.CPOTrainer.cpo_loss(trainer, mean[::2], mean[1::2])
    nll = -(batch["logps"] * mask)[::2].sum() / mask[::2].sum()
    return result(losses.mean() + loss.sft_weight * nll, batch, rewards(good, bad))


def rewards(good: torch.Tensor, bad: torch.Tensor) -> dict[str, list[float]]:
    return {
        "rewards/chosen": [good.mean().item()],
        "rewards/rejected": [bad.mean().item()],
        "rewards/accuracies": [(good > bad).double().mean().item()],
        "rewards/margins": [(good - bad).mean().item()],
    }


def result(value: torch.Tensor, batch: dict[str, torch.Tensor], metrics: Any) -> dict[str, Any]:
    (gradient,) = torch.autograd.grad(value, batch["logps"])
    last = {name: values[-1] for name, values in metrics.items() if values}
    return {"loss": value.item(), "gradient": gradient, **last}


TRL = {"kto": trl_kto, "orpo": trl_orpo, "simpo": trl_simpo}
LOSSES = {
    "sigmoid": PreferenceLoss(),
    "sigmoid, sft": PreferenceLoss(beta=0.3, sft_weight=0.7),
    "robust": PreferenceLoss("robust", label_smoothing=0.2),
    "hinge": PreferenceLoss("hinge", beta=0.5),
    "ipo": PreferenceLoss("ipo", beta=0.4),
    "sigmoid_norm": PreferenceLoss("sigmoid_norm", beta=2.0),
    "apo_zero": PreferenceLoss("apo_zero"),
    "apo_down": PreferenceLoss("apo_down"),
    "kto": PreferenceLoss("kto", desirable_weight=1.5, undesirable_weight=0.5),
    "orpo": PreferenceLoss("orpo", beta=0.2),
    "simpo": PreferenceLoss("simpo", beta=2.0, simpo_gamma=0.8, label_smoothing=0.1),
    "simpo, sft": PreferenceLoss("simpo", beta=2.0, sft_weight=1.0),
}


@pytest.mark.parametrize("name", LOSSES)
def test_loss_rewards_and_gradients_are_those_of_trl(name, batch, monkeypatch):
    monkeypatch.setattr(torch.Tensor, "float", lambda x: x.double())  # ORPO and means of TRL
    loss = LOSSES[name]
    found, expected = ours(loss, batch), TRL.get(loss.kind, trl_dpo)(loss, batch)
    assert found.pop("loss") == pytest.approx(expected.pop("loss"), abs=1e-9)
    gradient = expected.pop("gradient")
    assert gradient.abs().max() > 1e-3
    torch.testing.assert_close(found.pop("gradient"), gradient, rtol=0, atol=1e-9)
    shared = found.keys() & expected.keys()
    assert {"rewards/chosen", "rewards/rejected"} <= shared
    for one in shared:
        assert found[one] == pytest.approx(expected[one], abs=1e-9), one


@pytest.mark.parametrize("kind", ["sigmoid", "orpo", "kto"])
def test_parts_of_a_step_add_up_to_its_loss(kind, batch):
    """Micro-batches of different numbers of pairs, and slots without a pair."""
    loss = PreferenceLoss(kind, sft_weight=0.5)
    whole = answers_of(**batch)
    totals = Totals(whole.real.sum(), whole.tokens[:, 0].sum(), whole.all_tokens[:, 0].sum())
    kl = torch.tensor(0.3, dtype=torch.float64)
    expected, _ = loss_of(loss, whole, totals, kl)
    parts = []
    for rows in (slice(0, 2), slice(2, 8), slice(8, 10)):
        part = {name: tensor[rows] for name, tensor in batch.items()}
        part["answers"] = (part["answers"] - rows.start).clamp(min=0)
        parts.append(loss_of(loss, answers_of(**part), totals, kl)[0])
    assert sum(parts).item() == pytest.approx(expected.item(), abs=1e-12)


def test_smoothing_is_the_mean_of_both_directions(batch):
    """TRL's sigmoid has no smoothing; conservative DPO mixes a pair with the reversed one."""
    answers = answers_of(**batch)
    totals = Totals(answers.real.sum(), *[torch.tensor(1.0)] * 2)
    both = ("logps", "tokens", "all_logps", "all_tokens", "references")
    changed = {name: getattr(answers, name).flip(1) for name in both}
    reversed_ = dataclasses.replace(answers, **changed)
    one, other = (loss_of(PreferenceLoss(), a, totals)[0] for a in (answers, reversed_))
    found, _ = loss_of(PreferenceLoss(label_smoothing=0.3), answers, totals)
    assert found.item() == pytest.approx((0.7 * one + 0.3 * other).item(), abs=1e-12)
