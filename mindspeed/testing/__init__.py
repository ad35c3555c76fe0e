"""Instruments every other room is tested and measured with.

* :class:`RankPool`, :func:`run_ranks`: run a function on N gloo ranks.
"""

from __future__ import annotations

from mindspeed.testing.ranks import RankError, RankPool, run_ranks

__all__ = ["RankError", "RankPool", "run_ranks"]
