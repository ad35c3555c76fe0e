"""Attributes of Megatron-LM's arguments that a feature shows with other values."""

from __future__ import annotations

import argparse
import copy
import pickle

from mindspeed.adaptor.arguments import shown_as
from mindspeed.adaptor.importing import PostImportHooks
from mindspeed.adaptor.patch import PatchEngine
from mindspeed.adaptor.seams import Seams
from mindspeed.session import Session


def test_only_reading_an_attribute_shows_the_other_value():
    args = argparse.Namespace(heads=25, layers=2)
    args.__class__ = shown_as(argparse.Namespace, {"heads": 26})
    assert (args.heads, args.layers, "heads" in args) == (26, 2, True)
    assert vars(args) == {"heads": 25, "layers": 2}
    args.layers = 3
    assert args.layers == 3 and isinstance(args, argparse.Namespace)


def test_copies_and_pickles_are_ordinary_namespaces():
    args = argparse.Namespace(heads=25)
    args.__class__ = shown_as(argparse.Namespace, {"heads": 26})
    for other in (copy.copy(args), copy.deepcopy(args), pickle.loads(pickle.dumps(args, 2))):
        assert type(other) is argparse.Namespace and other.heads == 25
    args.__class__ = argparse.Namespace
    assert args.heads == 25


def test_a_feature_shows_values_until_it_is_detached():
    class Active(Session):
        def __init__(self):
            self.seams = Seams(PatchEngine(PostImportHooks(), None))

        def configure(self, values):
            self.seams.show_arguments(owner="feature", heads=26)

    args, active = argparse.Namespace(heads=25), Active()
    active._configure_from_namespace(args)
    assert args.heads == 26 and vars(args) == {"heads": 25}
    active.seams.clear()
    assert args.heads == 25 and type(args) is argparse.Namespace
