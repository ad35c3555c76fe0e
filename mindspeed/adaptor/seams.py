"""The joints of Megatron that features attach to.

A feature never patches Megatron. It hands a function to a seam; the seam patches Megatron once,
when the first function arrives, and calls all functions in the order in which they came.

| seam            | a function gets                         | and returns                     |
| --------------- | --------------------------------------- | ------------------------------- |
| layer_spec      | block, config, first_layer              | block                           |
| computing_layers| list: is this layer's MLP an MoE?       | the list of layers that compute |
| parallel_groups | (nothing; right after the groups exist) | -                               |
| batch           | batch: dict of tensors on this rank     | batch                           |
| rows            | rows: the leader's micro-batch, as read | rows                            |
| documents       | borders, tokens on the host, tokenizer  | borders of the documents        |
| schedule        | forward_backward_func                   | forward_backward_func           |
| optimizer       | optimizer                               | optimizer                       |
| train           | (nothing)                               | context manager around training |
| step            | iteration (1-based, the one that runs)  | context manager around one step |
| log             | iteration                               | text appended to the log line   |
| before_save     | iteration                               | -                               |
| after_load      | iteration                               | -                               |

``block`` holds one spec per layer of the model chunk that is being built, ``first_layer`` is the
index of its first layer in the whole model (both from 0). A layer with an attribute ``stored_as``
has that number in checkpoints with a name per layer. ``computing_layers`` is what Megatron's FLOPs
formula and its means over layers count.

A function of ``documents`` says where the documents of a micro-batch begin; the seam carries them
to the attention of every layer (:mod:`mindspeed.adaptor.documents` and ``carrying``).

All up to ``optimizer`` are in ``megatron.core`` (of ``rows`` and ``documents`` what concerns the
model) and so reach Megatron-LM, frameworks and our own trainer alike. The others belong to a
training loop: Megatron-LM's reaches them through patches of ``megatron.training``, our trainer
calls :meth:`Seam.run_all` and :meth:`Seam.around` itself.
(The seam for arguments is :mod:`mindspeed.adaptor.arguments`, always installed.)

A feature that replaces a computation inside Megatron's modules hands it to ``seams.use_kernels``
(:mod:`mindspeed.te.kernels`); Megatron's own functions for the same then call it, too
(:mod:`mindspeed.adaptor.computations`). What a feature must change outside Megatron (environment,
torch's flags) it changes through ``seams.journal``, and it is restored when the feature is
detached.
"""

from __future__ import annotations

import contextlib
import copy
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from mindspeed.adaptor import computations, documents
from mindspeed.adaptor.patch import Patch, PatchEngine
from mindspeed.adaptor.signatures import bind
from mindspeed.journal import Journal
from mindspeed.te import kernels


class Seam:
    """An ordered list of functions and the patches that make Megatron call them."""

    def __init__(self, name: str, engine: PatchEngine, patches: tuple[Patch, ...]) -> None:
        self.name = name
        self.functions: list[tuple[str, Callable[..., Any]]] = []
        self._engine = engine
        self.patches = patches

    def add(self, function: Callable[..., Any], *, owner: str) -> None:
        """Attach ``function``; the first one installs the seam's patches."""
        if not self.functions:
            for patch in self.patches:
                self._engine.add(patch)
        self.functions.append((owner, function))

    def clear(self) -> None:
        """Detach all functions and take the seam's patches back."""
        self.functions.clear()
        self._engine.remove(owner_of(self.name))

    def pipe(self, value: Any, *args: Any) -> Any:
        """Send ``value`` through all functions: each gets what the one before returned."""
        for _, function in self.functions:
            value = function(value, *args)
        return value

    def run_all(self, *args: Any) -> list[Any]:
        """Call all functions with the same arguments and collect what they return."""
        return [function(*args) for _, function in self.functions]

    @contextlib.contextmanager
    def around(self, *args: Any) -> Iterator[None]:
        """Enter the context managers that all functions return, leave them in reverse order."""
        with contextlib.ExitStack() as stack:
            for _, function in self.functions:
                stack.enter_context(function(*args))
            yield


class Seams:
    """All seams of one session, each an attribute (see the table above)."""

    def __init__(self, engine: PatchEngine) -> None:
        self._all = {name: Seam(name, engine, patches(self)) for name, patches in _PATCHES.items()}
        self.journal = Journal()
        self._engine = engine

    def __getattr__(self, name: str) -> Seam:
        try:
            return self.__dict__["_all"][name]
        except KeyError:
            raise AttributeError(f"no seam {name!r}; there are {', '.join(_PATCHES)}") from None

    def __iter__(self) -> Iterator[Seam]:
        return iter(self._all.values())

    def while_training(self, *, owner: str, **values: Any) -> None:
        """Let Megatron-LM's loop see other values of its arguments than the user gave."""
        self.train.add(lambda: _arguments_changed(values), owner=owner)

    def use_kernels(self, *, owner: str, **functions: Callable[..., Any]) -> None:
        """Compute with ``functions`` instead of the formulas of the same names in te.kernels.

        Megatron's own functions for the same are patched to call them.
        """
        for name, function in functions.items():
            if not hasattr(kernels, name):
                raise AttributeError(f"te.kernels has no {name!r}")
            self.journal.set(kernels, name, function, owner=owner)
            for patch in computations.CALLS.get(name, ()):
                self._engine.add(patch)

    def clear(self) -> None:
        """Detach everything from every seam."""
        for seam in self._all.values():
            seam.clear()
        self._engine.remove(computations.OWNER)
        self.journal.undo()


def owner_of(seam: str) -> str:
    """The owner under which a seam's patches are listed."""
    return f"seam:{seam}"


def _layer_spec(seams: Seams) -> tuple[Patch, ...]:
    def make(original: Callable[..., None]) -> Callable[..., None]:
        def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
            given = bind(original, (self, *args), kwargs)
            block = seams.layer_spec.pipe(*_block_of(given))
            given.pop("self")
            original(self, **(given | {"transformer_layer_spec": block}))

        return __init__

    def rename(original: Callable[..., Any]) -> Callable[..., Any]:
        def sharded_state_dict(
            self: Any, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None
        ) -> Any:
            state = original(self, prefix, sharded_offsets, metadata)
            _rename_stored_layers(state, f"{prefix}layers.", self.layers)
            return state

        return sharded_state_dict

    return (
        Patch(
            "megatron.core.models.gpt.gpt_model:GPTModel.__init__",
            make,
            owner_of("layer_spec"),
            "features transform the layer spec",
            expects="(self, config, transformer_layer_spec, vocab_size, max_sequence_length, ...)",
        ),
        Patch(
            "megatron.core.transformer.transformer_block:TransformerBlock.sharded_state_dict",
            rename,
            owner_of("layer_spec"),
            "features choose the number of a layer in checkpoints",
            expects="(self, prefix, sharded_offsets, metadata)",
        ),
    )


def _rename_stored_layers(state: Mapping[str, Any], prefix: str, layers: Any) -> None:
    """Give the entries of layers with an attribute ``stored_as`` that number, from 0."""
    numbers = {
        str(layer.layer_number - 1): layer.stored_as
        for layer in layers
        if hasattr(layer, "stored_as")
    }
    for entry in state.values():
        number, _, rest = entry.key.removeprefix(prefix).partition(".")
        if entry.key.startswith(prefix) and number in numbers:
            entry.key = f"{prefix}{numbers[number]}.{rest}"


def _block_of(given: Mapping[str, Any]) -> tuple[Any, Any, int]:
    """The specs of the layers in this model chunk, the config, and the chunk's first layer."""
    from megatron.core.transformer.transformer_block import _get_block_submodules
    from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
    from megatron.core.utils import get_pg_rank

    config, vp_stage, groups = given["config"], given.get("vp_stage"), given.get("pg_collection")
    pp_rank = None if groups is None else get_pg_rank(groups.pp)
    block = _get_block_submodules(config, given["transformer_layer_spec"], vp_stage, pp_rank)
    return block, config, get_transformer_layer_offset(config, vp_stage, pp_rank)


def _computing_layers(seams: Seams) -> tuple[Patch, ...]:
    def layers_of(values: Mapping[str, Any]) -> list[bool]:
        from mindspeed.profiling.model_flops import moe_pattern

        return seams.computing_layers.pipe(moe_pattern(values))

    def formula(original: Callable[..., Any]) -> Callable[..., Any]:
        def num_floating_point_operations(args: Any, *rest: Any, **kwargs: Any) -> Any:
            layers = layers_of(vars(args))
            seen = copy.copy(args)
            seen.num_layers = len(layers)
            seen.moe_layer_freq = [int(moe) for moe in layers]
            return original(seen, *rest, **kwargs)

        return num_floating_point_operations

    def means(original: Callable[..., Any]) -> Callable[..., Any]:
        def track_moe_metrics(*args: Any, **kwargs: Any) -> Any:
            given = bind(original, args, kwargs)
            if given["num_layers"] is not None:
                layers = layers_of({**given, "num_experts": 1})
                given["moe_layer_freq"] = [int(moe) for moe in layers]
            return original(**given)

        return track_moe_metrics

    owner = owner_of("computing_layers")
    return (
        Patch(
            "megatron.training.training:num_floating_point_operations",
            formula,
            owner,
            "layers that do not compute are not counted",
            expects="(args, batch_size)",
        ),
        Patch(
            "megatron.core.transformer.moe.moe_utils:track_moe_metrics",
            means,
            owner,
            "means over layers leave out those that do not compute",
            expects="(loss_scale, iteration, ...)",
        ),
    )


def _parallel_groups(seams: Seams) -> tuple[Patch, ...]:
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


def _pipe_result(seam: str, target: str, expects: str, why: str) -> Callable[[Seams], Any]:
    """A seam whose functions transform what ``target`` returns."""

    def patches(seams: Seams) -> tuple[Patch, ...]:
        def make(original: Callable[..., Any]) -> Callable[..., Any]:
            def call(*args: Any, **kwargs: Any) -> Any:
                return getattr(seams, seam).pipe(original(*args, **kwargs))

            return call

        return (Patch(target, make, owner_of(seam), why, expects=expects),)

    return patches


def _train(seams: Seams) -> tuple[Patch, ...]:
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


def _step(seams: Seams) -> tuple[Patch, ...]:
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
                "forward_backward_func, iteration)"
            ),
            versions=">=0.16",
        ),
    )


def _log(seams: Seams) -> tuple[Patch, ...]:
    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def training_log(*args: Any, **kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            iteration = bind(original, args, kwargs)["iteration"]
            texts = [text for text in seams.log.run_all(iteration) if text]
            if texts:
                _print_on_last_rank(" | ".join(texts))
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


def _before_save(seams: Seams) -> tuple[Patch, ...]:
    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def save_checkpoint(*args: Any, **kwargs: Any) -> Any:
            seams.before_save.run_all(bind(original, args, kwargs)["iteration"])
            return original(*args, **kwargs)

        return save_checkpoint

    return (
        Patch(
            "megatron.training.checkpointing:save_checkpoint",
            make,
            owner_of("before_save"),
            "features act before a checkpoint is written",
            expects="(iteration, model, optimizer, opt_param_scheduler, ...)",
        ),
    )


def _after_load(seams: Seams) -> tuple[Patch, ...]:
    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def load_checkpoint(*args: Any, **kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            seams.after_load.run_all(result[0])
            return result

        return load_checkpoint

    return (
        Patch(
            "megatron.training.checkpointing:load_checkpoint",
            make,
            owner_of("after_load"),
            "features act after a checkpoint was read",
            expects="(ddp_model, optimizer, opt_param_scheduler, load_arg, ...)",
        ),
    )


@contextlib.contextmanager
def _arguments_changed(values: Mapping[str, Any]) -> Iterator[None]:
    """Other values in Megatron-LM's global arguments; nothing to do where there are none."""
    global_vars = sys.modules.get("megatron.training.global_vars")
    if global_vars is None or global_vars._GLOBAL_ARGS is None:
        yield
        return
    args = global_vars.get_args()
    before = {name: getattr(args, name) for name in values}
    vars(args).update(values)
    try:
        yield
    finally:
        vars(args).update(before)


def _print_on_last_rank(text: str) -> None:
    import torch.distributed as dist

    if not dist.is_initialized() or dist.get_rank() == dist.get_world_size() - 1:
        print(text, flush=True)


_PATCHES: dict[str, Callable[[Seams], tuple[Patch, ...]]] = {
    "layer_spec": _layer_spec,
    "computing_layers": _computing_layers,
    "parallel_groups": _parallel_groups,
    "batch": _pipe_result(
        "batch",
        "megatron.core.utils:get_batch_on_this_cp_rank",
        "(batch, ...)",
        "features cut or pack the micro-batch",
    ),
    "rows": lambda seams: (documents.reading(seams, owner_of("rows")),),
    "documents": documents.patches,
    "schedule": _pipe_result(
        "schedule",
        "megatron.core.pipeline_parallel.schedules:get_forward_backward_func",
        "(...)",
        "features choose the pipeline schedule",
    ),
    "optimizer": _pipe_result(
        "optimizer",
        "megatron.core.optimizer:get_megatron_optimizer",
        "(config, model_chunks, ...)",
        "features wrap or replace the optimizer",
    ),
    "train": _train,
    "step": _step,
    "log": _log,
    "before_save": _before_save,
    "after_load": _after_load,
}
SEAM_NAMES = tuple(_PATCHES)
