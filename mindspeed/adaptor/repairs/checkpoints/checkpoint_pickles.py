"""Defects of what a checkpoint's pickles may name.

Defect: checkpoints and cached index maps are read with unrestricted ``pickle``.

Where: ``torch.distributed.checkpoint`` (``DefaultLoadPlanner.load_bytes``,
``FileSystemReader.read_metadata``) for the index of a directory and every object in it (generator
states, extra state); Transformer Engine modules with fp8 weights, which unpickle their extra state
a second time; ``numpy.load`` in Megatron's data sets for cached index maps.
Symptom: loading a checkpoint runs whatever code its author put there, also through Megatron-LM's
own ``load_checkpoint``.
Fix: these functions, and the names ``pickle`` and ``numpy`` in these modules, are replaced when the
module is imported by readers with an allow-list of classes (:mod:`mindspeed.unpickle`).

Defect: enum members pickled by Python 3.11.0 to 3.11.3 are not in Megatron's allow-list.

Where: ``megatron.core.safe_globals.SAFE_GLOBALS``, the classes that ``torch.load`` accepts. These
Pythons pickle an enum member as ``getattr(kind, name)``, and ``getattr`` is not in the list.
Symptom: on these Pythons Megatron refuses its own checkpoints, and every Python refuses checkpoints
written by them.
Fix: add a ``getattr`` to the list that resolves members of enums and nothing else.
"""

from __future__ import annotations

import functools
import io
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import numpy

from mindspeed.adaptor.importing import PostImportHooks
from mindspeed.adaptor.versions import checkpoints
from mindspeed.errors import SecurityError
from mindspeed.journal import Journal
from mindspeed.security import ENUM_MEMBER
from mindspeed.unpickle import PickleModule, read_index, read_object

OWNER = "security"
PLANNER = "torch.distributed.checkpoint.default_planner"
READER = "torch.distributed.checkpoint.filesystem"
ENGINES = (
    "megatron.core.extensions.transformer_engine",
    "transformer_engine.pytorch.module.base",
    "transformer_engine.pytorch.ops.op",
    "transformer_engine.pytorch.attention.dot_product_attention.dot_product_attention",
)
SAFE_GLOBALS = "megatron.core.safe_globals"
DATA_SETS = tuple(
    f"megatron.core.datasets.{name}"
    for name in ("gpt_dataset", "blended_dataset", "masked_dataset")
)


def install(hooks: PostImportHooks, journal: Journal) -> None:
    """Replace readers and extend Megatron's list when their modules are imported."""

    def planner(module: ModuleType) -> None:
        journal.set(module.DefaultLoadPlanner, "load_bytes", _load_bytes, owner=OWNER)

    def reader(module: ModuleType) -> None:
        journal.set(module.FileSystemReader, "read_metadata", _read_metadata, owner=OWNER)

    def data_set(module: ModuleType) -> None:
        journal.set(module, "numpy", _Numpy(), owner=OWNER)

    checkpoints.install(hooks, journal)
    hooks.around_import(SAFE_GLOBALS, functools.partial(_allow_enum_members, journal))
    hooks.when_imported(PLANNER, planner)
    hooks.when_imported(READER, reader)
    for name in ENGINES:
        hooks.when_imported(name, lambda module: guard_extra_state(module, journal))
    for name in DATA_SETS:
        hooks.when_imported(name, data_set)


@contextmanager
def _allow_enum_members(journal: Journal) -> Iterator[None]:
    """Extend the list when Megatron defines it, before it is passed to torch."""
    yield
    module = sys.modules[SAFE_GLOBALS]
    journal.set(module, "SAFE_GLOBALS", [*module.SAFE_GLOBALS, ENUM_MEMBER], owner="adaptor")


def guard_extra_state(module: ModuleType, journal: Journal) -> None:
    """Restrict the extra state that a Transformer Engine module reads to the allow-list."""
    if not hasattr(module, "pickle"):
        return
    journal.set(module, "pickle", PickleModule, owner=OWNER)
    for holder in list(vars(module).values()):
        if isinstance(holder, type) and holder.__module__ == module.__name__:
            taken = vars(holder).get("set_extra_state")
            if taken is not None:
                journal.set(holder, "set_extra_state", _checked(taken), owner=OWNER)


def _load_bytes(self: Any, read_item: Any, value: Any) -> None:
    """``DefaultLoadPlanner.load_bytes``: read an object into its place in the state dict."""
    from torch.distributed.checkpoint._nested_dict import set_element

    name = read_item.dest_index.fqn
    try:
        found = read_object(value)
    except SecurityError as error:
        raise SecurityError(f"refusing to load {name}: {error}") from None
    if self.flatten_state_dict:
        set_element(self.original_state_dict, self.mappings[name], found)
    else:
        self.state_dict[name] = found


def _read_metadata(self: Any, *args: Any, **kwargs: Any) -> Any:
    """``FileSystemReader.read_metadata``: the index, with this reader's ``load_id``."""
    from torch.distributed.checkpoint.metadata import StorageMeta

    rank = kwargs.get("rank")  # some writers of torch 2.8 and newer keep an index for each rank
    path = self.fs.concat_path(self.path, ".metadata" if rank is None else f"__{rank}.metadata")
    try:
        with self.fs.create_stream(path, "rb") as file:
            index = read_index(file)
    except SecurityError as error:
        raise SecurityError(f"refusing to load {path}: {error}") from None
    if getattr(index, "storage_meta", None) is None:
        index.storage_meta = StorageMeta()
    index.storage_meta.load_id = self.load_id
    return index


def _checked(set_extra_state: Callable[[Any, Any], None]) -> Callable[[Any, Any], None]:
    """Check a ``BytesIO`` state first: early engines load it with unrestricted ``torch.load``."""

    @functools.wraps(set_extra_state)
    def checked(self: Any, state: Any) -> None:
        if isinstance(state, io.BytesIO):
            read_object(io.BytesIO(state.getvalue()), map_location="cpu")
        set_extra_state(self, state)

    return checked


class _Numpy:
    """The module numpy with ``load(allow_pickle=False)``."""

    def __getattr__(self, name: str) -> Any:
        return getattr(numpy, name)

    @staticmethod
    def load(file: Any, *args: Any, **kwargs: Any) -> Any:
        """``numpy.load`` of an index map."""
        try:
            return numpy.load(file, *args, **{**kwargs, "allow_pickle": False})
        except ValueError as error:
            raise SecurityError(
                f"{file} is no index map of a data set ({error}); delete it, it is built again"
            ) from error
