"""Composition root of the bridge: which features are on, and what is installed in this process.

The only room that knows both the features and the adaptor. :mod:`.session` installs the adaptor and
attaches features, :mod:`.arguments` puts their flags into Megatron-LM's parser, :mod:`.config_file`
reads ``MINDSPEED_CONFIG``, :mod:`.inventory` lists every patch of the library.
"""

from __future__ import annotations

from mindspeed.session.session import Session, current, install, undo

__all__ = ["Session", "current", "install", "undo"]
