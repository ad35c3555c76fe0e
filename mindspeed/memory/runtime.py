"""Executes a plan on the layers of a model: one pair of saved-tensor hooks around each layer.

    runtime = Runtime(plan)
    layer.forward = runtime.layer("layers.0", layer.forward, layer.parameters)
    norm.forward = runtime.site("layers.0", "input_layernorm", norm.forward)

While a layer runs, a stack knows which site computes, and every tensor that autograd saves is
treated as the innermost planned site says (:mod:`mindspeed.memory.plan`). Only the innermost pair
of hooks is called by torch, so sites do not push hooks of their own.

Without gradients, in a second run, and for layers without a plan, the wrapped functions call the
original at once.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_leaves

from mindspeed.memory.figures import CountedStorages, Figures, SiteFigures
from mindspeed.memory.frames import (
    Frame,
    LayerFrame,
    SiteFrame,
    drop_outputs,
    dropped_output,
    key_of,
)
from mindspeed.memory.host_copy import OffloadedCopy, OnHost, elements_of
from mindspeed.memory.offload import MIN_BYTES, Offload
from mindspeed.memory.plan import LAYER, ChunkPlan, LayerPlan, SiteAction
from mindspeed.memory.saved import Kept, ViewOf
from mindspeed.memory.segment import Segment

Forward = Callable[..., Any]
Tensors = Callable[[], Iterable[torch.Tensor]]


class _State(threading.local):
    """State of one thread: backward may run in another than forward."""

    def __init__(self) -> None:
        self.frames: list[Frame] = []
        self.reruns = 0


class Runtime:
    """The plan of a model chunk in execution.

    Args:
        plan: What to do; :attr:`plan` may be replaced between two iterations.
        environment: Of a layer, by its name: what a second run must find as the first did, as
            :data:`~mindspeed.memory.segment.Environment`. Default: random states.
        min_bytes: Smaller tensors are not copied to the host.
        offload: Makes the host copies; :attr:`offload` may be replaced between two iterations.
            Default: one of its own, with ``min_bytes``.

    Attributes:
        region: Of a layer and a site: what surrounds both runs where the site is computed again,
            one object a call; None: nothing.
    """

    def __init__(
        self,
        plan: ChunkPlan,
        environment: Callable[[str], Callable[[], AbstractContextManager[object]]] | None = None,
        min_bytes: int = MIN_BYTES,
        offload: Offload | None = None,
    ) -> None:
        self.plan, self.figures = plan, Figures()
        self.offload = offload or Offload(min_bytes=min_bytes)
        self.environment = environment or (lambda layer: random_states())
        self.region: Callable[[str, str], SiteFrame | None] = lambda layer, site: None
        self._state = _State()
        self.wrapped: dict[str, set[str]] = {}
        self.owners: dict[tuple[str, str], str] = {}
        self._storages = CountedStorages()
        self._trial_offload: Offload | None = None
        self._microbatch: Any = None
        self._segments: list[tuple[Any, weakref.ref[Segment]]] = []

    def layer(self, name: str, forward: Forward, parameters: Tensors) -> Forward:
        """Return ``forward`` of a layer, with the hooks around it where the layer has a plan."""

        @functools.wraps(forward)
        def run(*args: Any, **kwargs: Any) -> Any:
            plan = self.plan.layers.get(name)
            if not plan or not self._active():
                return forward(*args, **kwargs)
            call = LayerFrame(name, plan, {key_of(p) for p in parameters()})
            if SiteAction.OFFLOAD in plan.values() or self.offload.live:
                call.group = self.offload.begin(id(self), name)
            frame = Frame(call, LAYER, SiteAction.KEEP)
            self._state.frames.append(frame)
            try:
                with _hooks(self._pack):
                    if LAYER in plan:
                        outputs = self._run_site(frame, LAYER, forward, args, kwargs)
                    else:
                        outputs = forward(*args, **kwargs)
            finally:
                self.end(frame)
            if call.group is not None:
                self.offload.end(call.group)
                _on_backward(outputs, functools.partial(self.offload.reach, call.group))
            return outputs

        return run

    def site(self, layer: str, site: str, forward: Forward) -> Forward:
        """Return ``forward`` of a site of a layer, under the site's action."""

        @functools.wraps(forward)
        def run(*args: Any, **kwargs: Any) -> Any:
            outer = self.site_frame(layer, site)
            if outer is None:
                return forward(*args, **kwargs)
            return self._run_site(outer, site, forward, args, kwargs)

        return run

    @contextlib.contextmanager
    def trial(self, layer: str, plan: LayerPlan) -> Iterator[Figures]:
        """Run the block with another plan for ``layer``, and count it apart.

        Storages that are counted already do not count: they exist whatever the layer does.
        """
        before = self.plan, self.figures, self._storages, self.offload
        self.plan = ChunkPlan({**self.plan.layers, layer: plan})
        self.figures, self._storages = Figures(), self._storages.copy()
        self.offload = self._trial_offload = self._trial_offload or Offload(
            min_bytes=self.offload.min_bytes
        )
        try:
            yield self.figures
        finally:
            self.plan, self.figures, self._storages, self.offload = before

    @contextlib.contextmanager
    def microbatch(self, key: Any) -> Iterator[None]:
        """Let :meth:`pending` find the segments of the block under ``key``."""
        before, self._microbatch = self._microbatch, key
        try:
            yield
        finally:
            self._microbatch = before

    def pending(self, key: Any) -> list[Segment]:
        """The segments of a micro-batch that backward has not used up, in order of their forward.

        ``materialize`` of a segment computes it now, ``discard`` drops what was computed.
        """
        found = [(k, segment) for k, ref in self._segments if (segment := ref()) and segment.needed]
        self._segments = [(k, weakref.ref(segment)) for k, segment in found]
        return [segment for k, segment in found if k == key]

    def site_frame(self, layer: str, site: str) -> Frame | None:
        """The frame in which a site of ``layer`` would run now; None: it has no action."""
        state = self._state
        if not self._active() or not state.frames:
            return None
        frame = state.frames[-1]
        open_to_sites = frame.call.name == layer and frame.segment is None
        return frame if open_to_sites and site in frame.call.plan else None

    def begin(
        self, outer: Frame, site: str, forward: Forward, args: tuple[Any, ...], kwargs: Any
    ) -> Frame:
        """A site starts to compute inside ``outer``."""
        call, action = outer.call, outer.call.plan[site]
        figures = self.figures.of(call.name, site)
        figures.calls += 1
        segment, region = None, None
        if action.recomputes:
            region = self.region(call.name, site)
            environment = functools.partial(self._rerun, call.name, region)
            segment = Segment(
                f"{call.name}, {site}", forward, args, kwargs, environment, figures.count_rerun
            )
            if self._microbatch is not None:
                self._segments.append((self._microbatch, weakref.ref(segment)))
        frame = Frame(call, site, action, segment, region)
        self._state.frames.append(frame)
        return frame

    def end(self, frame: Frame) -> None:
        """The site of :meth:`begin` has computed, or failed."""
        assert self._state.frames[-1] is frame
        self._state.frames.pop()
        self.offload.poll()

    def _active(self) -> bool:
        state = self._state
        return torch.is_grad_enabled() and not state.reruns

    def _run_site(
        self, outer: Frame, site: str, forward: Forward, args: tuple[Any, ...], kwargs: Any
    ) -> Any:
        frame = self.begin(outer, site, forward, args, kwargs)
        region = frame.region
        try:
            with region.first_run() if region is not None else contextlib.nullcontext():
                outputs = forward(*args, **kwargs)
        finally:
            self.end(frame)
        drop_outputs(frame, outputs, (args, kwargs))
        return outputs

    def _rerun(
        self, layer: str, region: SiteFrame | None
    ) -> Callable[[], AbstractContextManager[object]]:
        enter = self.environment(layer)

        @contextlib.contextmanager
        def rerun() -> Iterator[None]:
            self._state.reruns += 1
            inside = region.second_run() if region is not None else contextlib.nullcontext()
            try:
                with enter(), inside:
                    yield
            finally:
                self._state.reruns -= 1

        return rerun

    def _pack(self, tensor: torch.Tensor) -> Any:
        frame = self._state.frames[-1]
        call, figures = frame.call, self.figures.of(frame.call.name, frame.site)
        exists = key_of(tensor) in call.parameters
        if frame.segment is not None:
            if not exists:
                self._storages.count(tensor, figures, "dropped")
            return frame.segment.save(tensor)
        where = f"{call.name}, {frame.site}"
        if exists:
            return Kept(tensor, where)
        if (output := dropped_output(call, tensor)) is not None:
            self._storages.count(tensor, figures, "dropped")
            return ViewOf(output.segment.save_output(output.number, tensor), tensor)
        if frame.action is SiteAction.OFFLOAD and self.offload.takes(tensor):
            return OnHost(self._host_copy(call, tensor, where, figures), tensor)
        self._storages.count(tensor, figures, "kept")
        return Kept(tensor, where)

    def _host_copy(
        self, call: LayerFrame, tensor: torch.Tensor, where: str, figures: SiteFigures
    ) -> OffloadedCopy:
        key = (key_of(tensor), *elements_of(tensor))
        known = call.copies.get(key)
        if known is None or known[0].expired():
            assert call.group is not None  # the plan has the action
            copy = self.offload.save(tensor, call.group, where, figures)
            known = call.copies[key] = StorageWeakRef(tensor.untyped_storage()), copy
        return known[1]


def _on_backward(outputs: Any, function: Callable[[], None]) -> None:
    """Call ``function`` when backward has the gradient of the first of the outputs that has one."""
    for output in tree_leaves(outputs):
        if isinstance(output, torch.Tensor) and output.requires_grad:
            output.register_hook(lambda gradient: function())
            return


def _hooks(pack: Callable[[torch.Tensor], Any]) -> AbstractContextManager[object]:
    return torch.autograd.graph.saved_tensors_hooks(pack, lambda saved: saved.get())


def random_states() -> Callable[[], AbstractContextManager[object]]:
    """The environment of a model without random streams of its own: torch's generators."""
    host = torch.random.get_rng_state()
    accelerator = torch.accelerator.current_accelerator()
    module = torch.get_device_module(accelerator) if accelerator is not None else None
    state = module.get_rng_state() if module is not None else None

    @contextlib.contextmanager
    def restored() -> Iterator[None]:
        with torch.random.fork_rng(device_type=accelerator.type if accelerator else "cuda"):
            torch.random.set_rng_state(host)
            if module is not None:
                module.set_rng_state(state)
            yield

    return restored
