"""Save policies: which of its three large tensors the stage ``experts`` keeps for backward.

For each row that a rank receives, with a gate (elements; h hidden, f of an expert):

    rows    what the experts get                  h      back by: permute and dispatch again
    fc1     output of the first linear layer      2 f    back by: the same product again
    act     the activation, times probabilities   f      back by: the activation function again

    all      keeps rows, fc1, act     h + 3 f
    act      keeps rows, fc1          h + 2 f
    x_only   keeps rows               h
    level0   keeps fc1                2 f
    level1   keeps nothing            0

Row maps and probabilities, about 20 bytes a row, stay. A policy that drops rows communicates in
backward, so it must be the same on all ranks; one that drops ``fc1`` may differ from rank to rank.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class SavePolicy:
    """The tensors that are kept.

    Attributes:
        rows: The experts' input; if not, backward dispatches the tokens again.
        fc1: The output of the first linear layer.
        shared: The same tensors of the shared experts, which get their input back from the layer's.
    """

    rows: bool = True
    fc1: bool = True
    act: bool = True
    shared: bool = True

    def __or__(self, other: SavePolicy) -> SavePolicy:
        """The policy that drops what either drops."""
        return SavePolicy(
            self.rows and other.rows,
            self.fc1 and other.fc1,
            self.act and other.act,
            self.shared and other.shared,
        )

    def elements(self, hidden: int, ffn: int, *, gated: bool = True) -> int:
        """Elements that the experts keep of one row.

        Args:
            ffn: Width of an expert on this rank.
            gated: ``fc1`` is twice as wide.
        """
        return self.rows * hidden + self.fc1 * ffn * (2 if gated else 1) + self.act * ffn


ALL = SavePolicy()
ACT = SavePolicy(act=False)
X_ONLY = SavePolicy(fc1=False, act=False)
LEVEL0 = SavePolicy(rows=False, act=False)
LEVEL1 = SavePolicy(rows=False, fc1=False, act=False, shared=False)

LEVELS = {"disable": ALL, "level0": LEVEL0, "level1": LEVEL1}
"""Policies of ``--moe-zero-memory``."""


def load(rows: int, tokens: int, topk: int, slices: int) -> float:
    """The load of a rank: rows that it received, 1.0 when they are balanced.

    Args:
        rows: That its experts compute.
        tokens: Of a rank before they are dispatched.
        slices: Ranks that hold slices of the same experts; each gets the rows of all.
    """
    balanced = tokens * topk * slices
    return rows / balanced if balanced else 0.0
