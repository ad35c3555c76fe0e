"""Members of enumerations as Python 3.11.0 to 3.11.3 pickle them, on any Python."""

from __future__ import annotations


class Attribute:
    """Is pickled as ``getattr(holder, name)``."""

    def __init__(self, holder: object, name: str) -> None:
        self.of = holder, name

    def __reduce__(self) -> tuple[object, tuple[object, str]]:
        return getattr, self.of
