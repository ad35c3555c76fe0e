"""Pages that need no network: a template, its data, and what all of them share (``page.html``)."""

from __future__ import annotations

from pathlib import Path

_SHARED = Path(__file__).with_suffix(".html")


def page_of(template: Path, data: str) -> str:
    """The page of a template.

    Args:
        template: has ``<!-- shared -->`` in its head, where the style and ``byId``, ``make`` and
            ``legend`` of every page go, and ``>DATA<`` as the content of a script element.
        data: JSON or base64.
    """
    text = template.read_text("utf-8").replace("<!-- shared -->", _SHARED.read_text("utf-8"))
    escaped = data.replace("</", "<\\/")
    return text.replace(">DATA<", f">{escaped}<")
