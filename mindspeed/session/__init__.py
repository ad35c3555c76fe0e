"""Composition root of the bridge: which features are on, and what is installed in this process.

:mod:`.session` installs the adaptor, reads ``MINDSPEED_CONFIG`` and attaches the features that the
arguments enable.
"""

from __future__ import annotations

from mindspeed.session.session import Session, current, install, undo

__all__ = ["Session", "current", "install", "undo"]
