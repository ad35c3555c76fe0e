"""How unevenly tokens go to experts: what a plan assumes about the routing.

    loads = expert_loads("1.25")            # the busiest rank gets 1.25 times the mean
    loads = expert_loads("routing.json")    # tokens of each expert, as a run has counted them
    loads = expert_loads("routing")         # or the folder of --moe-record-routing
    loads.imbalance(ranks=8)                # load of the busiest of 8 expert-parallel ranks

Ranks wait for the busiest one at every exchange, so its tokens decide time and memory. It is the
rank that is counted: its products, its messages and its bytes are executed with that many tokens.
Experts on one rank, and ranks without expert parallelism, share all tokens however they are routed.

A file is JSON: the tokens of all experts, or a list of these for several layers. Expert-parallel
ranks hold consecutive experts; of several layers the mean counts.

Without the flag tokens are equally many, and intervals of predicted seconds reach to a busiest rank
with :data:`UNKNOWN` times the mean: what training with a loss for the balance leaves, about.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

from mindspeed.errors import ConfigError
from mindspeed.job import MixtureOfExperts, Parallel
from mindspeed.moe.load.routing import read as read_routing
from mindspeed.parsing import read_json

UNKNOWN = 1.25
"""Load of the busiest rank over the mean, up to which intervals reach where nothing is said."""
MOST = 1000.0


@dataclass(frozen=True)
class ExpertLoads:
    """Assumed loads of experts.

    Attributes:
        factor: load of the busiest rank over the mean.
        tokens: of the experts of each layer, instead of the factor.
        text: as the user has given it; empty: not at all.
    """

    factor: float = 1.0
    tokens: tuple[tuple[int, ...], ...] = ()
    text: str = ""

    def imbalance(self, ranks: int) -> float:
        """Load of the busiest of so many expert-parallel ranks over the mean."""
        if not self.tokens:
            return min(self.factor, float(ranks))
        return sum(_busiest(layer, ranks) for layer in self.tokens) / len(self.tokens)

    def more(self, args: argparse.Namespace) -> float:
        """Part of its tokens that the busiest rank of a job may get beyond what is assumed."""
        moe = MixtureOfExperts.of(args)
        if self.text or not moe.count or moe.forced:
            return 0.0
        return min(UNKNOWN, float(Parallel.of(args).expert)) - 1.0

    def check(self, args: argparse.Namespace) -> None:
        """Refuse loads that are not those of a job with final values ``args``.

        Raises:
            ConfigError: says why.
        """
        if not self.text:
            return
        moe = MixtureOfExperts.of(args)
        if not moe.count:
            raise ConfigError(f"--expert-imbalance {self.text}: the model has no experts")
        if moe.forced:
            raise ConfigError(
                f"--expert-imbalance {self.text}: with --moe-router-force-load-balancing experts "
                "get equal numbers of tokens; remove one"
            )
        for layer in self.tokens:
            if len(layer) != moe.count:
                raise ConfigError(
                    f"--expert-imbalance {self.text}: it has {len(layer)} experts, the model "
                    f"{moe.count}"
                )

    def sentence(self, args: argparse.Namespace) -> str:
        """What is assumed of a job with experts, for people."""
        if MixtureOfExperts.of(args).forced:
            return "experts get equal numbers of tokens, by --moe-router-force-load-balancing"
        if not self.text:
            return (
                "experts get equal numbers of tokens, and intervals reach to a busiest rank with "
                f"{UNKNOWN:g} times the mean (--expert-imbalance)"
            )
        if self.tokens:
            return f"experts get tokens as {self.text} has recorded them"
        return f"the busiest expert-parallel rank gets {self.factor:g} times the mean"


def _busiest(layer: tuple[int, ...], ranks: int) -> float:
    local = len(layer) // ranks
    most = max(sum(layer[rank * local : (rank + 1) * local]) for rank in range(ranks))
    return most * ranks / sum(layer)


BALANCED = ExpertLoads()
"""What is assumed where nothing is said."""


def loads_of(args: argparse.Namespace) -> ExpertLoads:
    """The loads that a job is planned with."""
    found: ExpertLoads = vars(args).get("expert_loads", BALANCED)
    return found


def assumed(args: argparse.Namespace) -> str:
    """What a plan assumes about the data of a job with final values ``args``, in words."""
    documents = "every sample is one document"
    if not MixtureOfExperts.of(args).count:
        return documents
    return f"{documents}; {loads_of(args).sentence(args)}"


def expert_loads(text: str) -> ExpertLoads:
    """Read ``--expert-imbalance``: a number of at least 1, a file or a folder.

    Raises:
        ConfigError: it is neither.
    """
    if Path(text).is_dir():  # of --moe-record-routing
        layers = read_routing(Path(text)).layers
        return ExpertLoads(tokens=tuple(tuple(one.tokens) for one in layers.values()), text=text)
    if text.endswith(".json"):
        return ExpertLoads(tokens=_recorded(text), text=text)
    try:
        factor = float(text)
    except ValueError:
        factor = 0.0
    if not 1.0 <= factor <= MOST:
        raise ConfigError(
            f"--expert-imbalance {text}: give the load of the busiest rank over the mean, as 1.25, "
            "or FILE.json with the tokens of each expert, or a folder of --moe-record-routing"
        )
    return ExpertLoads(factor, text=text)


def _recorded(name: str) -> tuple[tuple[int, ...], ...]:
    found = read_json(Path(name), f"--expert-imbalance {name}")
    layers = found if isinstance(found, list) and found and isinstance(found[0], list) else [found]
    for layer in layers:
        whole = isinstance(layer, list) and all(type(n) is int and n >= 0 for n in layer)
        if not whole or not sum(layer):
            raise ConfigError(
                f"--expert-imbalance {name}: it is no list of the tokens of each expert, as "
                "[120, 80, ...], and no list of such lists for several layers"
            )
    return tuple(map(tuple, layers))
