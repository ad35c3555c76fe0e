"""The original's feature classes and parsers of arguments, for code that defines or lists features.

    from mindspeed.features_manager.feature import MindSpeedFeature

    class Fast(MindSpeedFeature):
        def __init__(self):
            super().__init__("fast-thing")
        def register_args(self, parser):
            parser.add_argument("--fast-thing", action="store_true")
        def register_patches(self, patch_manager, args):
            patch_manager.register_patch("megatron.core....", thing_wrapper)

``mindspeed.megatron_adaptor.repatch`` applies what is in ``FEATURES_LIST`` besides our own
features; other doors call :class:`MindSpeedFeaturesManager`. New code writes a plug-in
(docs/extending.md).

``get_batch_on_this_cp_rank`` is for scripts that shard their batches themselves.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from typing import Any

from mindspeed.adaptor.arguments import script_arguments
from mindspeed.adaptor.current_batch import get_actual_seq_len, shard_current_batch
from mindspeed.adaptor.versions.batch_functions import zigzag_chunks
from mindspeed.errors import ConfigError
from mindspeed.features.feature import Feature, option_of
from mindspeed.features.registry import LevelOptions, all_features
from mindspeed.flags import add_flags, changed
from mindspeed.session.registered_patches import MindSpeedPatchesManager
from mindspeed.session.session import current, install, read_config_file


class MindSpeedFeature:
    """Base class of the original's features; methods do nothing until a subclass defines them.

    Args:
        feature_name: Name of its flag, with dashes or underscores.
        optimization_level: Least ``--optimization-level`` at which it acts; at 0 it always does.
    """

    def __init__(self, feature_name: str, optimization_level: int = 2) -> None:
        self.feature_name = feature_name.lower().strip().replace("-", "_")
        self.optimization_level = optimization_level
        self.default_patches = optimization_level == 0

    def is_need_apply(self, args: argparse.Namespace) -> bool:
        """Whether the feature is on with these arguments."""
        level = getattr(args, "optimization_level", LevelOptions().optimization_level)
        on = self.optimization_level <= level and getattr(args, self.feature_name, None)
        return bool(on) or self.default_patches

    def register_args(self, parser: argparse.ArgumentParser) -> None:
        """Add its flags."""

    def pre_validate_args(self, args: argparse.Namespace) -> None:
        """Change arguments before Megatron validates them."""

    def validate_args(self, args: argparse.Namespace) -> None:
        """Refuse arguments."""

    def post_validate_args(self, args: argparse.Namespace) -> None:
        """Change arguments after Megatron has validated them."""

    def pre_register_patches(
        self, patch_manager: type[MindSpeedPatchesManager], args: argparse.Namespace
    ) -> None:
        """Register patches that are applied before those of all features."""

    def register_patches(
        self, patch_manager: type[MindSpeedPatchesManager], args: argparse.Namespace
    ) -> None:
        """Register patches."""

    def incompatible_check(self, global_args: argparse.Namespace, check_args: str) -> None:
        """Refuse another flag.

        Raises:
            ConfigError: This feature's flag and the flag of the name ``check_args`` are on.
        """
        if getattr(global_args, self.feature_name, None) and getattr(global_args, check_args, None):
            raise ConfigError(
                f"{option_of(self.feature_name)} cannot be combined with {option_of(check_args)}; "
                "remove one"
            )

    def dependency_check(self, global_args: argparse.Namespace, check_args: str) -> None:
        """Require another flag.

        Raises:
            ConfigError: This feature's flag is on, and the flag of the name ``check_args`` is not.
        """
        on = getattr(global_args, self.feature_name, None)
        if on and not getattr(global_args, check_args, None):
            raise ConfigError(
                f"{option_of(self.feature_name)} needs {option_of(check_args)}; add it"
            )

    @staticmethod
    def add_parser_argument_choices_value(
        parser: argparse.ArgumentParser, argument_name: str, value: Any
    ) -> None:
        """Let a flag that the parser has already take another value.

        Args:
            parser: Megatron's.
            argument_name: As in ``--position-embedding-type``; a parser without it is left alone.
            value: The new choice.
        """
        action = parser._option_string_actions.get(argument_name)
        if action is not None and action.choices is not None and value not in action.choices:
            action.choices = [*action.choices, value]


class _OurFeature(MindSpeedFeature):
    """One of our features: its flags. The session attaches it, whatever list it is in."""

    def __init__(self, kind: type[Feature]) -> None:
        super().__init__(kind.name, kind.level)
        self.kind = kind
        self.default_patches = False

    def register_args(self, parser: argparse.ArgumentParser) -> None:
        """Add the flags that Megatron does not declare itself."""
        title = f"mindspeed: {self.kind.name}"
        add_flags(parser, self.kind, title, read_config_file(), own=True)


def create_features_list() -> list[MindSpeedFeature]:
    """All features of this library, in a new list."""
    return [_OurFeature(kind) for kind in all_features()]


FEATURES_LIST = create_features_list()
"""The features whose flags :func:`process_args` adds; other code adds its own."""


class MindSpeedFeaturesManager:
    """Runs a step of all features of a list; that of :data:`FEATURES_LIST` by default."""

    FEATURES_LIST = FEATURES_LIST

    @classmethod
    def set_features_list(cls, features_list: list[MindSpeedFeature]) -> None:
        """Take another list; features of ours that it lacks keep their flags out of parsers."""
        cls.FEATURES_LIST[:] = features_list

    @classmethod
    def register_features_args(cls, parser: argparse.ArgumentParser) -> None:
        """Add all flags."""
        for feature in cls.FEATURES_LIST:
            feature.register_args(parser)

    @classmethod
    def pre_validate_features_args(cls, args: argparse.Namespace) -> None:
        """Let every feature change arguments before Megatron validates them."""
        for feature in cls.FEATURES_LIST:
            feature.pre_validate_args(args)

    @classmethod
    def validate_features_args(cls, args: argparse.Namespace) -> None:
        """Let every feature refuse arguments."""
        for feature in cls.FEATURES_LIST:
            feature.validate_args(args)

    @classmethod
    def post_validate_features_args(cls, args: argparse.Namespace) -> None:
        """Let every feature change arguments that Megatron has validated."""
        for feature in cls.FEATURES_LIST:
            feature.post_validate_args(args)

    @classmethod
    def apply_features_pre_patches(cls, mindspeed_args: argparse.Namespace) -> None:
        """Apply the early patches of the features that are on."""
        for feature in cls.FEATURES_LIST:
            if feature.is_need_apply(mindspeed_args):
                feature.pre_register_patches(MindSpeedPatchesManager, mindspeed_args)
        MindSpeedPatchesManager.apply_patches()

    @classmethod
    def apply_features_patches(cls, mindspeed_args: argparse.Namespace) -> None:
        """Apply the patches of the features that are on."""
        for feature in cls.FEATURES_LIST:
            if feature.is_need_apply(mindspeed_args):
                feature.register_patches(MindSpeedPatchesManager, mindspeed_args)
        MindSpeedPatchesManager.apply_patches()

    @staticmethod
    def remove_patches() -> None:
        """Take back the patches of all features; our own features stay attached."""
        MindSpeedPatchesManager.remove_patches()


def apply_added_features(args: Mapping[str, Any] | argparse.Namespace) -> None:
    """Apply the features in :data:`FEATURES_LIST` that other code has added, anew.

    Where there are such features, all registered patches are taken back and forgotten first.

    Args:
        args: Values by name, over the defaults of all flags.
    """
    if all(isinstance(feature, _OurFeature) for feature in FEATURES_LIST):
        return
    given = vars(args) if isinstance(args, argparse.Namespace) else args
    values = changed(get_mindspeed_args(get_defaults=True), **given)
    MindSpeedFeaturesManager.remove_patches()
    MindSpeedFeaturesManager.apply_features_pre_patches(values)
    MindSpeedFeaturesManager.apply_features_patches(values)


def process_args(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add ``--optimization-level`` and the flags of :data:`FEATURES_LIST`; returns the parser.

    Flags that Megatron-LM declares, too, are left to it.
    """
    add_flags(parser, LevelOptions, "mindspeed", read_config_file())
    MindSpeedFeaturesManager.register_features_args(parser)
    return parser


def get_mindspeed_args(get_defaults: bool = False) -> argparse.Namespace:
    """The flags of the features with their values, as a new namespace.

    Those of the features that are attached, where some are; before, those of the command line.

    Args:
        get_defaults: The defaults, whatever is attached or on the command line.
    """
    parser = process_args(argparse.ArgumentParser(allow_abbrev=False, add_help=False))
    words = [] if get_defaults else sys.argv[1:]
    args, _ = parser.parse_known_args(words)
    session = current()
    if not get_defaults and session is not None and session.configuration is not None:
        configuration = session.configuration
        level = {"optimization_level": configuration.level}
        return changed(args, **level | configuration.values())
    return args


def get_full_args() -> argparse.Namespace:
    """Megatron-LM's global arguments; in a framework without them those of the features."""
    return script_arguments() or get_mindspeed_args()


def get_batch_on_this_cp_rank(batch: dict[str, Any]) -> dict[str, Any]:
    """This context-parallel rank's part of a micro-batch. No communication.

    Args:
        batch: ``[b, s]`` tensors by name, None for tensors this pipeline stage does not need.
            ``position_ids`` are kept; where they are None, positions restart at each document.

    Returns:
        ``[b, tokens of this rank]`` tensors, and no attention mask where documents are known
        (``--reset-attention-mask`` or an adaptive ``--context-parallel-algo``).

    Raises:
        ConfigError: Documents do not fit the batch, or the model would not look at them.
    """
    if install().seams.documents.functions:
        return shard_current_batch(batch)
    if get_actual_seq_len() is not None:
        raise ConfigError("set_actual_seq_len needs --reset-attention-mask")
    return zigzag_chunks(batch)
