"""One installation of the adaptor in this process: what is installed and what is on.

Phase A, :meth:`Session.install`, runs at ``import mindspeed.megatron_adaptor`` and needs no
arguments: device layer, Transformer Engine substitute, upstream repairs, argument hooks. It does
not import Megatron. Phase B, :meth:`Session.configure`, runs when Megatron's arguments are final
(or when a framework calls :func:`mindspeed.configure`) and attaches the enabled features to the
seams.

Everything can be undone, and configured again with other values in the same process.
"""

from __future__ import annotations

import argparse
import functools
import logging
import os
from collections import ChainMap
from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from mindspeed import device, plugins, te
from mindspeed.adaptor.arguments import argument_patches, config_patches, shown_as
from mindspeed.adaptor.importing import (
    PostImportHooks,
    model_parallel_is_initialized,
    refuse_late_import,
)
from mindspeed.adaptor.inventory import all_patches
from mindspeed.adaptor.patch import Patch, PatchEngine
from mindspeed.adaptor.repairs import repairs_for, repairs_for_arguments
from mindspeed.adaptor.repairs.checkpoints import checkpoint_pickles, serialization_format
from mindspeed.adaptor.repairs.layers import bridge_adapters
from mindspeed.adaptor.repairs.layers.cuda_kernels import corrected_arguments
from mindspeed.adaptor.repairs.scripts import absent_triton, eager_wandb, failed_exit, numpy_names
from mindspeed.adaptor.seams import Seams
from mindspeed.adaptor.versions import check_megatron_version, defined, megatron_version
from mindspeed.errors import ConfigError
from mindspeed.features.registry import (
    Configuration,
    add_arguments,
    derived,
    own_flags,
    refuse_unknown,
    resolve,
)
from mindspeed.journal import Journal
from mindspeed.session.reached import ReachedFeatures

CONFIG_FILE = "MINDSPEED_CONFIG"


def read_config_file() -> dict[str, Any]:
    """The values of the file named by ``MINDSPEED_CONFIG``, or nothing.

    Raises:
        ConfigError: the file is missing or no mapping.
    """
    name = os.environ.get(CONFIG_FILE)
    if not name:
        return {}
    from mindspeed.parsing import read_yaml  # loads the YAML package, rarely needed here

    values = read_yaml(name, f"{CONFIG_FILE}={name}")
    if not isinstance(values, dict) or not all(isinstance(key, str) for key in values):
        raise ConfigError(f"{CONFIG_FILE}={name} must hold a mapping from option names to values")
    return {key.lstrip("-").replace("-", "_"): value for key, value in values.items()}


logger = logging.getLogger("mindspeed")


class Session:
    """The adaptor's state in this process."""

    def __init__(self) -> None:
        version = megatron_version()
        if version is not None:
            check_megatron_version(version)
        self.device = device.current()
        self.journal = Journal()
        self.hooks = PostImportHooks()
        self.engine = PatchEngine(self.hooks, version)
        self.seams = Seams(self.engine)
        self.te, self.te_reason = te.choose(self.device.name)
        self.configuration: Configuration | None = None
        self.reached = ReachedFeatures()
        self._repairs: tuple[Patch, ...] = ()  # those that Megatron's arguments may require

    def install(self) -> None:
        """Phase A.

        Raises:
            ImportError: Megatron was imported earlier, without a Transformer Engine.
        """
        if self.te == "substitute":
            refuse_late_import()
        self.hooks.install()
        device.install(self.journal)
        te.install(self.journal)
        absent_triton.install(self.hooks)
        eager_wandb.install(self.hooks)
        checkpoint_pickles.install(self.hooks, self.journal)
        bridge_adapters.install(self.hooks, self.journal)
        serialization_format.install(self.hooks, self.journal)
        failed_exit.install(self.journal)
        numpy_names.install(self.journal)
        of_arguments = argument_patches(
            _add_flags, own_flags, _derive, self._configure_from_namespace
        )
        of_configs = config_patches(own_flags, self._chosen)
        version = megatron_version()
        here = (patch for patch in all_patches() if patch.applies_to(version))
        self.engine.prepare(patch.target for patch in here)
        repairs = repairs_for(self.device, self.te)
        for patch in (*defined.PATCHES, *repairs, *of_arguments, *of_configs):
            self.engine.add(patch)
        self._repair_for({})

    def configure(
        self, values: Mapping[str, Any] | argparse.Namespace, *, strict: bool = False
    ) -> Configuration:
        """Phase B: decide which features are on and attach them.

        Another call replaces the choice, until the parallel groups exist. A value of Megatron's
        that cannot work here is corrected: in a namespace, which is Megatron's own. A mapping is
        only read.

        Args:
            values: Megatron's arguments and our options together.
            strict: refuse names that are no option of ours.

        Returns:
            The choice; ``corrections`` are values that Megatron should get for those given.

        Raises:
            ConfigError: wrong options, or another choice after the parallel groups exist.
        """
        from_file = read_config_file()
        refuse_unknown(from_file, f"{CONFIG_FILE}: ")
        # A view, not a copy: Megatron sets some values later (the padded vocabulary size).
        if isinstance(values, argparse.Namespace):
            values = ChainMap(vars(values), from_file)
        else:
            if strict:
                refuse_unknown(values)
            values = ChainMap({}, values, from_file)  # type: ignore[arg-type]  # it is only read
        corrections = dict(corrected_arguments(values, self.device.name))
        values.update(corrections)
        of_layout = derived(values)
        values.update(of_layout)
        corrections.update(of_layout)
        new = resolve(values, self.device.name)
        old = self.configuration
        if old is not None and model_parallel_is_initialized():
            if old.changed_values() == new.changed_values():
                return old
            raise ConfigError(
                "the parallel groups exist already, so these options cannot change: "
                f"{', '.join(_difference(old, new))}; call mindspeed.undo() and "
                "destroy_model_parallel() first, or mindspeed.megatron_adaptor.repatch(args)"
            )
        self._forget_features()
        for feature in new.enabled:
            of_feature = feature.corrects(values)
            values.update(of_feature)
            corrections.update(of_feature)
        self._attach(new, MappingProxyType(values))
        self.reached = ReachedFeatures(new.enabled, self.seams.uses, values)
        self.reached.watch()
        self.configuration = new = replace(new, corrections=MappingProxyType(corrections))
        _log_choice(new)
        return new

    def detach_features(self) -> None:
        """Take all features back; the compatibility layer stays."""
        self._forget_features()
        self._repair_for({})

    def _forget_features(self) -> None:
        self.seams.clear()
        self.reached.stop_watching()
        self.configuration = None

    def undo(self) -> None:
        """Take everything back, newest first."""
        self._forget_features()
        self.engine.undo()
        self.hooks.uninstall()
        self.journal.undo()

    def _chosen(self) -> dict[str, Any]:
        """All options with their values; none before a choice."""
        return self.configuration.values() if self.configuration else {}

    def _configure_from_namespace(self, args: argparse.Namespace) -> None:
        self.configure(args)
        if shown := dict(self.seams.shown_arguments):
            self.seams.journal.call_on_undo(
                functools.partial(setattr, args, "__class__", type(args))
            )
            args.__class__ = shown_as(type(args), shown)

    def _repair_for(self, megatron: Mapping[str, Any]) -> None:
        """Install the repairs that these arguments of Megatron's need, and those not told."""
        needed = repairs_for_arguments(megatron, self.te)
        for owner in {patch.owner for patch in self._repairs} - {patch.owner for patch in needed}:
            self.engine.remove(owner)
        for patch in needed:
            self.engine.add(patch)
        self._repairs = needed

    def _attach(self, configuration: Configuration, megatron: Mapping[str, Any]) -> None:
        self.seams.parallel_groups.add(plugins.require_same_on_all_ranks, owner="plugins")
        try:
            self._repair_for(megatron)
            for feature in configuration.enabled:
                seams = self.seams.declared_by(feature.name, feature.seams)
                feature.attach(seams, megatron)
        except Exception:
            self.detach_features()
            raise


def _add_flags(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    add_arguments(parser, read_config_file())
    from mindspeed.attention.strategy import COMM_TYPE_NOT_GIVEN

    parser.set_defaults(cp_comm_type=COMM_TYPE_NOT_GIVEN)
    return parser


def _derive(args: argparse.Namespace) -> None:
    vars(args).update(derived(vars(args)))


def _difference(old: Configuration, new: Configuration) -> list[str]:
    before, after = old.changed_values(), new.changed_values()
    names = sorted(before.keys() | after.keys())
    return ["--" + n.replace("_", "-") for n in names if before.get(n) != after.get(n)]


def _log_choice(configuration: Configuration) -> None:
    if int(os.environ.get("RANK", "0")) == 0 and configuration.enabled:
        names = ", ".join(feature.name for feature in configuration.enabled)
        logger.info("features on: %s (%s)", names, configuration.changed_values())


_session: Session | None = None


def current() -> Session | None:
    """The installed session, or None."""
    return _session


def install() -> Session:
    """Install the adaptor once; later calls return the same session."""
    global _session
    if _session is None:
        session = Session()
        try:
            session.install()
        except Exception:
            session.undo()
            raise
        _session = session
    return _session


def undo() -> None:
    """Take the adaptor back: torch and Megatron are as they were before."""
    global _session
    if _session is not None:
        _session.undo()
        _session = None
