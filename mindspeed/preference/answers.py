"""Sums over the tokens of each answer of a micro-batch.

    answers    1 1 1 1  2 2 2 2 2  0      of the tokens of a rank, 0: padding
    logps      a b c d  e f g h i  j      log-probability of each next token
    loss_mask  0 1 1 0  0 1 1 1 0  0
    sums       b+c      f+g+h             one for each answer, on every rank

Context-parallel ranks have parts of an answer: one all-reduce of the sums (12 bytes an answer or
more), whose backward is the identity: every rank computes the same loss, and gradients of
parameters are summed over the ranks later.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from mindspeed.spmd import Collective, I, P, typed


@dataclass(frozen=True)
class Answers:
    """What losses read of the answers of a micro-batch, ``[pairs, 2]`` each: chosen, rejected.

    Attributes:
        logps: log-probability of the answer.
        tokens: of the answer, fp32; 0 where there is no such pair.
        all_logps: log-probability of prompt and answer.
        all_tokens: of prompt and answer, fp32.
        references: log-probability of the answer by the reference model.
        values: ``[pairs]``, fp32: margins, or whether judged answers are wanted.
    """

    logps: torch.Tensor
    tokens: torch.Tensor
    all_logps: torch.Tensor
    all_tokens: torch.Tensor
    references: torch.Tensor
    values: torch.Tensor

    @property
    def real(self) -> torch.Tensor:
        """Whether there is such a pair, bool ``[pairs]``."""
        return self.tokens[:, 0] > 0


def answers_of(
    logps: torch.Tensor,
    loss_mask: torch.Tensor,
    answers: torch.Tensor,
    values: torch.Tensor,
    references: torch.Tensor,
    group: Any = None,
) -> Answers:
    """Sums of a micro-batch. Collective over the context-parallel group.

    Args:
        logps: log-probabilities of next tokens ``[b, s]``, fp32.
        loss_mask: fp32 ``[b, s]``: 1 where the next token belongs to the answer.
        answers: int64 ``[b, s]``: numbers of answers from 1 on, those of a pair follow each other.
        values: fp32 ``[b, s]``, numbers at first tokens.
        references: fp32 ``[b, s]``, the same.
        group: context-parallel ranks, which have parts of the sequence; None for one.
    """
    inside = (answers > 0).to(logps.dtype)
    ranks = 1 if group is None else group.size()
    terms = [logps * loss_mask, logps * inside, loss_mask, inside, references, values]
    sums = sums_of_answers(terms, answers, most_answers(answers.numel() * ranks), group)
    pairs = sums.view(len(terms), -1, 2).unbind()
    answer, whole, tokens, all_tokens, reference, value = pairs
    return Answers(answer, tokens, whole, all_tokens, reference, value[:, 0])


def most_answers(tokens: int) -> int:
    """An even number of answers that so many tokens have at most; each has 1 input or more."""
    return tokens + tokens % 2


def sums_of_answers(
    terms: Sequence[torch.Tensor], answers: torch.Tensor, count: int, group: Any = None
) -> torch.Tensor:
    """Sums of numbers of tokens over each answer. Collective over the context-parallel group.

    Args:
        terms: ``[b, s]`` each, any floating dtype.
        answers: int64 ``[b, s]``, as for :func:`answers_of`.
        count: of answers, or more.
        group: context-parallel ranks; None for one.

    Returns:
        ``[terms, count]``.
    """
    rows = torch.stack([term.reshape(-1) for term in terms])
    sums = rows.new_zeros(len(terms), count + 1).index_add(1, answers.reshape(-1), rows)
    return sum_over_ranks(sums[:, 1:], group)


def sum_over_ranks(x: torch.Tensor, group: Any) -> torch.Tensor:
    """The sum of a tensor over ranks, each of which computes the same loss from it.

    Args:
        x: any shape and floating dtype.
        group: the ranks; None for one.
    """
    if group is None or group.size() == 1:
        return x
    return _SumOverRanks.apply(x, group)  # type: ignore[no-any-return]


@typed(Collective(source=P, result=I, sums=True))
class _SumOverRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Any) -> torch.Tensor:
        total = x.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grads[0], None
