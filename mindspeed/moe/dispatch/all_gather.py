"""All-gather: every rank gets all tokens of the group and computes those of its experts.

    compact    which experts each token goes to, as ids and weights
    ids        gathered: int16, ``[n, k]`` of each rank
    weights    gathered: ``[n, k]``
    tokens     gathered: ``[n, h]``
    locate     the tokens of this rank's experts: a map, and how many each expert has
    arrange    a row for each (token, local expert), sorted by expert
    disarrange the sum of the rows of each token, over local experts
    combine    reduce-scatter: the sum over ranks, to the rank of the token

Good for few ranks and many experts per token: a rank sends ``n h (ranks - 1)`` elements each way,
however many experts a token has. Expert tensor parallelism needs nothing else: the slices' partial
results are summed by the same reduce-scatter. All ranks have equally many tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from mindspeed.moe.collectives import Gather, ReduceScatter
from mindspeed.moe.dispatch.all_to_all import ExpertGroups
from mindspeed.moe.dispatch.compact import (
    TOO_MANY,
    as_bytes,
    chosen,
    compact,
    expand,
    from_bytes,
)
from mindspeed.moe.host_copy import HostCopy
from mindspeed.moe.interpreter import Chunk, Stages
from mindspeed.moe.program import Program
from mindspeed.moe.request import LayerRequest
from mindspeed.moe.save.refetch import Steps
from mindspeed.moe.split_phase import Collective
from mindspeed.te import kernels

SERIAL = Program.parse(
    "shared route compact ids! weights! tokens! locate arrange experts disarrange combine! finish"
)
ASYNC = Program.parse(
    "shared route compact ids> weights> tokens> ids< locate weights< tokens< arrange experts "
    "disarrange combine! finish"
)
OVERLAP = Program.parse(
    "route compact ids> weights> tokens> shared_fc1 ids< locate anchor weights< tokens< arrange "
    "experts disarrange combine> shared_fc2 combine< finish"
)


def program(request: LayerRequest) -> Program:
    if request.overlap:
        return OVERLAP
    return ASYNC if request.async_permutation else SERIAL


@dataclass(frozen=True)
class AllGatherDispatcher:
    """The stages; see the module's documentation.

    Attributes:
        width: the most experts that a token can have.
    """

    groups: ExpertGroups
    width: int

    def stages(self) -> Stages:
        """Functions of this dispatcher by name."""
        return Stages(
            compute={
                "compact": self.compact,
                "locate": self.locate,
                "arrange": self.arrange,
                "disarrange": self.disarrange,
                "finish": self.finish,
            },
            communicate={
                "ids": self.ids,
                "weights": self.weights,
                "tokens": self.tokens,
                "combine": self.combine,
            },
            repeat=self.repeat,
        )

    def compact(self, chunk: Chunk) -> None:
        """``probs`` and ``routing_map [n, e]`` to ``ids`` (bytes) and ``weights [n, width]``."""
        tensors = chunk.tensors
        ids, tensors["weights"] = compact(tensors["probs"], tensors["routing_map"], self.width)
        tensors["ids"] = as_bytes(ids)
        tensors["rows"] = tensors["hidden"]

    def ids(self, chunk: Chunk) -> Mapping[str, Collective]:
        """Ids of all ranks' tokens."""
        return self._gather("ids")

    def weights(self, chunk: Chunk) -> Mapping[str, Collective]:
        """Weights of all ranks' tokens."""
        return self._gather("weights")

    def tokens(self, chunk: Chunk) -> Mapping[str, Collective]:
        """All ranks' tokens."""
        return {name: self.groups.wire.tokens(x) for name, x in self._gather("rows").items()}

    def _gather(self, name: str) -> Mapping[str, Collective]:
        group = self.groups.tp_ep
        return {} if group.size() == 1 else {name: Gather(group)}

    def locate(self, chunk: Chunk) -> None:
        """Map gathered tokens to local experts; start copying the counts to the host."""
        ids = from_bytes(chunk.tensors["ids"])
        local = torch.where(ids >= 0, ids - self.groups.first, ids)
        routing_map = chosen(local, self.groups.local)
        too_many = (ids == TOO_MANY).any().long().view(1)
        counts = chunk.values["host_counts"] = HostCopy()
        counts.start(torch.cat([routing_map.sum(0), too_many]))
        chunk.tensors |= {"local": local, "local_map": routing_map}

    def arrange(self, chunk: Chunk) -> None:
        """Gathered tokens to ``rows [copies, h]``, sorted by local expert and by token.

        Raises:
            RuntimeError: on all ranks: a router chose more experts than there are places for.
        """
        tensors, values = chunk.tensors, chunk.values
        counts = values["host_counts"].get()
        if counts[-1]:
            raise RuntimeError(
                f"a token has more than {self.width} experts, the most that its router may choose"
            )
        values["tokens_per_expert"] = counts[:-1]
        probs, _ = expand(tensors["local"], tensors["weights"], self.groups.local)
        values["gathered"] = tensors["rows"].shape
        rows, row_probs, values["row_id_map"] = kernels.moe_permute(
            tensors["rows"],
            probs,
            tensors["local_map"],
            int(values["tokens_per_expert"].sum()),
        )
        assert row_probs is not None
        tensors["rows"], tensors["row_probs"] = rows, row_probs

    def disarrange(self, chunk: Chunk) -> None:
        """The sums over local experts, ``[gathered tokens, h]``, in the dtype of the weights."""
        tensors, values = chunk.tensors, chunk.values
        summed = kernels.moe_unpermute(
            tensors["rows"], values["row_id_map"], None, values["gathered"]
        )
        if self.groups.tp_ep.size() > 1:
            summed = summed.to(tensors["row_probs"].dtype)
        tensors["rows"] = summed

    def combine(self, chunk: Chunk) -> Mapping[str, Collective]:
        """The sums over ranks, ``[n, h]``."""
        group = self.groups.tp_ep
        if group.size() == 1:
            return {}
        return {"rows": self.groups.wire.results(ReduceScatter(group))}

    def repeat(self, chunk: Chunk) -> Steps:
        """Dispatch ``hidden [n, h]`` to experts' ``rows [m, h]`` again, without ids and weights."""
        values, group = chunk.values, self.groups.tp_ep
        ids, copies = values["row_id_map"], int(values["tokens_per_expert"].sum())
        again = lambda tokens: kernels.moe_permute_again(tokens, ids, copies)  # noqa: E731
        return [again] if group.size() == 1 else [self.groups.wire.tokens(Gather(group)), again]

    def finish(self, chunk: Chunk) -> None:
        """``output [n, h]`` in the dtype of the tokens."""
        chunk.tensors["output"] = chunk.tensors["rows"].to(chunk.tensors["hidden"].dtype)
