"""Cross-references of docstrings, ``:class:`Name```, as links of the documentation.

mkdocstrings calls this file (``extensions`` in mkdocs.yml). What has no place in the documentation
becomes code without a link.
"""

from __future__ import annotations

import re
from typing import Any

from griffe import Extension, NameResolutionError, Object

_ROLE = re.compile(r":(?:attr|class|data|func|meth|mod):`(~?)([^`]+)`")


class Roles(Extension):
    """Replaces the roles in every docstring."""

    def on_object(self, *, obj: Object, **kwargs: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = _ROLE.sub(
                lambda role: _link(obj, *role.groups()), obj.docstring.value
            )


def _link(scope: Object, last_only: str, name: str) -> str:
    shown = name.rpartition(".")[2] if last_only else name.lstrip(".")
    head, *rest = name.lstrip(".").split(".")
    try:
        target = ".".join([scope.resolve(head), *rest])
    except NameResolutionError:
        target = name
    return f'<autoref identifier="{target}" optional><code>{shown}</code></autoref>'
