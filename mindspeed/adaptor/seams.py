"""The joints of Megatron that features attach to.

A feature never patches Megatron. It attaches a function to a seam; the seam patches Megatron once,
when the first function arrives, and calls all functions in the order in which they came.

| seam            | a function gets                         | and returns                     |
| --------------- | --------------------------------------- | ------------------------------- |
| pipeline_ends   | (first, last): bool; vp_stage or None   | (first, last)                   |
| model_arguments | dict: the arguments of ``GPTModel``     | dict                            |
| layer_spec      | block, config, first_layer              | block                           |
| chunk           | model, config, vp_stage; once it exists | -                               |
| computing_layers| list: is this layer's MLP an MoE?       | the list of layers that compute |
| parallel_groups | (nothing; right after the groups exist) | -                               |
| batch           | dict: what tensor-parallel rank 0 read  | dict, which is broadcast        |
| documents       | cu_seqlens, tokens (host), tokenizer    | cu_seqlens of the documents     |
| schedule        | forward_backward_func                   | forward_backward_func           |
| optimizer_args  | dict: ``get_megatron_optimizer``'s      | dict                            |
| optimizer       | optimizer                               | optimizer                       |
| train           | (nothing)                               | context manager around training |
| step            | iteration (1-based, the one that runs)  | context manager around one step |
| log             | iteration                               | text appended to the log line   |
| figures         | iteration                               | dict of numbers for the metrics |
| expert_counts   | [layers, experts]: tokens of a step     | -                               |
| balance_losses  | losses about to be summed over ranks    | context manager around the sum  |

``model_arguments``, ``layer_spec`` and ``chunk`` are called in this order around the constructor of
every model chunk (:mod:`mindspeed.adaptor.construction`). A feature that changes the
transformer config, the process groups, ``pre_process``, ``post_process`` or the spec of multi-token
prediction does so in ``model_arguments``; one that changes built layers, those of multi-token
prediction included, does so on the instances it gets from ``chunk``.

``block`` holds one spec per layer of the model chunk that is being built, ``first_layer`` is the
index of its first layer in the whole model (both from 0). A layer with an attribute ``stored_as``
has that number in checkpoints with a name per layer. ``computing_layers`` is what Megatron's FLOPs
formula and its means over layers count.

A function of ``pipeline_ends`` says whether a chunk of this rank, or any of them for None, embeds
tokens and whether it computes the loss: these chunks read (:mod:`mindspeed.adaptor.pipeline_ends`).

A function of ``documents`` finds the documents of a micro-batch; the seam passes them to the
attention of every layer (:mod:`mindspeed.adaptor.packed_documents`, ``packed_seq_params``).

All up to ``optimizer`` are in ``megatron.core`` (of ``batch`` and ``documents`` what concerns the
model) and so reach Megatron-LM, frameworks and our own trainer alike. The others belong to a
training loop: Megatron-LM's reaches them through patches of ``megatron.training``, our trainer
calls :meth:`Seam.run_all` and :meth:`Seam.around` itself. ``figures`` is our trainer's alone; the
last two are ``megatron.core``'s again (:mod:`mindspeed.adaptor.moe`).
(The seam for arguments is :mod:`mindspeed.adaptor.arguments`, always installed.)

With ``--optimizer muon`` the two optimizer seams get the whole optimizer in our trainer; with
Megatron-LM features that use them are refused (:mod:`mindspeed.adaptor.construction`).

A feature that replaces a computation inside Megatron's modules, a decision of attention, or the
update rule and state storage of Adam, hands it to ``seams.use_kernels``
(:mod:`mindspeed.te.kernels`, :mod:`mindspeed.te.attention_policy`,
:mod:`mindspeed.te.optimizer_policy`); Megatron's own functions for the same then call it, too
(:mod:`mindspeed.adaptor.fused_functions`). What a feature must change outside Megatron
(environment, torch's flags) it changes through ``seams.journal``, and it is restored when the
feature is detached.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Collection, Iterator, Mapping
from types import ModuleType
from typing import Any, cast

from mindspeed.adaptor import construction, fused_functions, moe, packed_documents
from mindspeed.adaptor.arguments import script_arguments
from mindspeed.adaptor.construction import OptimizerConstruction
from mindspeed.adaptor.patch import Patch, PatchEngine
from mindspeed.adaptor.pipeline_ends import readers_patches
from mindspeed.adaptor.printing import print_rank_last
from mindspeed.adaptor.seam import Seam, SeamTable, Use, owner_of
from mindspeed.adaptor.signatures import bind
from mindspeed.flags import changed
from mindspeed.journal import Journal
from mindspeed.te import attention_policy, comm, kernels, local_linears, optimizer_policy


class Seams(SeamTable):
    """All seams of one session, each an attribute (see the table above)."""

    def __init__(self, engine: PatchEngine) -> None:
        self.model_construction = construction.build_patch(self)  # shared by three seams
        self.optimizer_construction = OptimizerConstruction(self)  # shared by two
        super().__init__(
            {name: Seam(name, engine, patches(self)) for name, patches in _PATCHES.items()}
        )
        self.journal = Journal()
        self.shown_arguments: dict[str, Any] = {}
        self._kernels: dict[tuple[str, str], bool] = {}  # owner and kernel -> has it been called?
        self._engine = engine

    def while_training(self, *, owner: str, **values: Any) -> None:
        """Let Megatron-LM's loop see other values of its arguments than the user gave."""
        self.train.add(lambda: _arguments_changed(values), owner=owner)

    def show_arguments(self, *, owner: str, **values: Any) -> None:
        """Let Megatron-LM read other values of its arguments than the user gave.

        Files and comparisons get the user's (:func:`mindspeed.adaptor.arguments.shown_as`).
        """
        self.shown_arguments.update(values)

    def use_kernels(self, *, owner: str, **functions: Callable[..., Any]) -> None:
        """Use ``functions`` instead of those of the same names in te's tables.

        The tables are te.kernels, attention_policy, optimizer_policy and comm. Megatron's own
        functions for the same are patched to call them.
        """
        for name, function in functions.items():
            table = _table_with(name)
            if table is optimizer_policy:
                optimizer_policy.check_in_use(owner)
            self.journal.set(table, name, self._noticed(owner, name, function), owner=owner)
            for patch in fused_functions.PATCHES.get(name, ()):
                self._engine.add(patch)
            converter = (fused_functions.OWNER, local_linears.convert_chunk)
            if name in fused_functions.LINEAR_KERNELS and converter not in self.chunk.functions:
                self.chunk.add(local_linears.convert_chunk, owner=fused_functions.OWNER)

    def uses(self) -> list[Use]:
        """Every place where an owner hooks in, and whether it has been reached."""
        of_seams = [
            Use(owner, seam.name, seam.reached)
            for seam in self
            if seam.name not in _NOT_IN_EVERY_STEP
            for owner in dict.fromkeys(owner for owner, _ in seam.functions)
        ]
        return of_seams + [
            Use(owner, f"kernels.{name}", called) for (owner, name), called in self._kernels.items()
        ]

    def declared_by(self, feature: str, names: Collection[str]) -> Seams:
        """The view of the seams that a feature gets: only those that it declares."""
        return cast(Seams, _DeclaredSeams(self, feature, names))

    def clear(self) -> None:
        """Detach everything from every seam."""
        self.shown_arguments.clear()
        self._kernels.clear()
        for seam in self._all.values():
            seam.clear()
        self._engine.remove(fused_functions.OWNER)
        self.journal.undo()

    def _noticed(self, owner: str, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """The same function, whose first call is noticed."""
        self._kernels[owner, name] = False

        @functools.wraps(function)
        def kernel(*args: Any, **kwargs: Any) -> Any:
            self._kernels[owner, name] = True
            return function(*args, **kwargs)

        return kernel


class _DeclaredSeams:
    """The seams named in ``Feature.seams``; the others are refused.

    ``kernels`` stands for :meth:`Seams.use_kernels`. The journal is there for every feature.
    """

    def __init__(self, seams: Seams, feature: str, names: Collection[str]) -> None:
        self._seams, self._feature, self._names = seams, feature, names

    def __getattr__(self, name: str) -> Any:
        seam = _SEAM_OF_METHOD.get(name, name)
        if seam != "journal" and seam not in self._names:
            raise AttributeError(
                f"feature {self._feature!r} uses the seam {seam!r}, which its Feature.seams "
                f"{tuple(self._names)} does not name"
            )
        return getattr(self._seams, name)


_SEAM_OF_METHOD = {
    "use_kernels": "kernels",
    "while_training": "train",
    "show_arguments": "model_arguments",
}


def _table_with(name: str) -> ModuleType:
    """The module whose function ``name`` features may replace."""
    tables = (kernels, attention_policy, optimizer_policy, comm)
    for module in tables:
        found = getattr(module, name, None)
        if callable(found) and not name.startswith("_"):
            return module
    names = " and ".join(module.__name__ for module in tables)
    raise AttributeError(f"no kernel {name!r}: {names} list what features may replace")


def _computing_layers(seams: SeamTable) -> tuple[Patch, ...]:
    def layers_of(values: Mapping[str, Any]) -> list[bool]:
        from mindspeed.profiling.model_flops import moe_pattern

        return seams.computing_layers.pipe(moe_pattern(values))

    def formula(original: Callable[..., Any]) -> Callable[..., Any]:
        def num_floating_point_operations(args: Any, *rest: Any, **kwargs: Any) -> Any:
            from mindspeed.profiling.model_flops import window_pattern

            layers = layers_of(vars(args))
            windows = window_pattern(vars(args), seams.computing_layers.pipe)
            moe = [int(layer) for layer in layers]
            there = {"num_layers": len(layers), "moe_layer_freq": moe}
            args = changed(args, window_attn_skip_freq=windows, **there)
            return original(args, *rest, **kwargs)

        return num_floating_point_operations

    def means(original: Callable[..., Any]) -> Callable[..., Any]:
        def report(*args: Any, **kwargs: Any) -> Any:
            given = bind(original, args, kwargs)
            if given["num_layers"] is not None:
                layers = layers_of({**given, "num_experts": 1})
                given["moe_layer_freq"] = [int(moe) for moe in layers]
            return original(**given)

        return report

    owner = owner_of("computing_layers")
    return (
        Patch(
            "megatron.training.training:num_floating_point_operations",
            formula,
            owner,
            "layers that do not compute are not counted",
            expects="(args, batch_size, ...)",
        ),
        *(
            Patch(
                f"megatron.core.transformer.moe.{target}",
                means,
                owner,
                "means over layers leave out those that do not compute",
                expects=expects,
                versions=versions,
            )
            for target, expects, versions in _MEANS_OVER_LAYERS
        ),
    )


_MEANS_OVER_LAYERS = (
    ("moe_utils:track_moe_metrics", "(loss_scale, iteration, ...)", "<0.18"),
    ("moe_logging:MoEMetricsTracker.report", "(self, loss_scale, iteration, ...)", ">=0.18"),
)


def _parallel_groups(seams: SeamTable) -> tuple[Patch, ...]:
    def make(original: Callable[..., None]) -> Callable[..., None]:
        def initialize_model_parallel(*args: Any, **kwargs: Any) -> None:
            original(*args, **kwargs)
            seams.parallel_groups.run_all()

        return initialize_model_parallel

    return (
        Patch(
            "megatron.core.parallel_state:initialize_model_parallel",
            make,
            owner_of("parallel_groups"),
            "features add process groups",
            expects="(tensor_model_parallel_size, pipeline_model_parallel_size, ...)",
        ),
    )


def _pipe_result(seam: str, target: str, expects: str, why: str) -> Callable[[SeamTable], Any]:
    """A seam whose functions transform what ``target`` returns."""

    def patches(seams: SeamTable) -> tuple[Patch, ...]:
        def make(original: Callable[..., Any]) -> Callable[..., Any]:
            def call(*args: Any, **kwargs: Any) -> Any:
                return getattr(seams, seam).pipe(original(*args, **kwargs))

            return call

        return (Patch(target, make, owner_of(seam), why, expects=expects),)

    return patches


def _train(seams: SeamTable) -> tuple[Patch, ...]:
    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def train(*args: Any, **kwargs: Any) -> Any:
            with seams.train.around():
                return original(*args, **kwargs)

        return train

    return (
        Patch(
            "megatron.training.training:train",
            make,
            owner_of("train"),
            "features act before and after training",
            expects="(forward_step_func, model, optimizer, opt_param_scheduler, ...)",
        ),
    )


def _step(seams: SeamTable) -> tuple[Patch, ...]:
    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def train_step(*args: Any, **kwargs: Any) -> Any:
            finished = bind(original, args, kwargs)["iteration"]
            with seams.step.around(finished + 1):
                return original(*args, **kwargs)

        return train_step

    return (
        Patch(
            "megatron.training.training:train_step",
            make,
            owner_of("step"),
            "features act around each step",
            expects=(
                "(forward_step_func, data_iterator, model, optimizer, opt_param_scheduler, config, "
                "forward_backward_func, iteration, ...)"
            ),
            versions=">=0.16",
        ),
    )


def _log(seams: SeamTable) -> tuple[Patch, ...]:
    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def training_log(*args: Any, **kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            iteration = bind(original, args, kwargs)["iteration"]
            texts = [text for text in seams.log.run_all(iteration) if text]
            if texts:
                print_rank_last(" | ".join(texts))
            return result

        return training_log

    return (
        Patch(
            "megatron.training.training:training_log",
            make,
            owner_of("log"),
            "features add to the log",
            expects="(loss_dict, total_loss_dict, learning_rate, ...)",
        ),
    )


@contextlib.contextmanager
def _arguments_changed(values: Mapping[str, Any]) -> Iterator[None]:
    """Other values in Megatron-LM's global arguments; nothing to do where there are none."""
    args = script_arguments()
    if args is None:
        yield
        return
    before = {name: getattr(args, name) for name in values}
    vars(args).update(values)
    try:
        yield
    finally:
        vars(args).update(before)


def _pipeline_ends(seams: SeamTable) -> tuple[Patch, ...]:
    owner = owner_of("pipeline_ends")
    return *readers_patches(seams, owner), *packed_documents.read_patches(seams, owner)


_PATCHES: dict[str, Callable[[Seams], tuple[Patch, ...]]] = {
    "pipeline_ends": _pipeline_ends,
    "model_arguments": lambda seams: (seams.model_construction,),
    "layer_spec": lambda seams: (
        seams.model_construction,
        construction.checkpoint_patch(),
    ),
    "chunk": lambda seams: (seams.model_construction,),
    "computing_layers": _computing_layers,
    "parallel_groups": _parallel_groups,
    "batch": lambda seams: packed_documents.read_patches(seams, owner_of("batch")),
    "documents": packed_documents.patches,
    "schedule": _pipe_result(
        "schedule",
        "megatron.core.pipeline_parallel.schedules:get_forward_backward_func",
        "(...)",
        "features choose the pipeline schedule",
    ),
    "optimizer_args": lambda seams: (seams.optimizer_construction.patch,),
    "optimizer": lambda seams: (seams.optimizer_construction.patch,),
    "train": _train,
    "step": _step,
    "log": _log,
    "figures": lambda seams: (),
    "expert_counts": moe.expert_counts,
    "balance_losses": moe.balance_losses,
}
SEAM_NAMES = tuple(_PATCHES)
_NOT_IN_EVERY_STEP = ("figures", "expert_counts", "balance_losses")
"""Seams that many jobs reach late or never, which is no defect."""
