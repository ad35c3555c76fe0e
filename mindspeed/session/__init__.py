"""Composition root of the bridge: which features are on, and what is installed in this process.

:mod:`.session` installs the adaptor and attaches the features that the arguments enable,
:mod:`.config_file` reads ``MINDSPEED_CONFIG``.
"""

from __future__ import annotations

from mindspeed.session.session import Session, current, install, undo

__all__ = ["Session", "current", "install", "undo"]
