"""The lab as a notebook widget: the same page, with requests over the connection of the kernel."""

from __future__ import annotations

import importlib.util
from typing import Any

from ...errors import UnsupportedError
from ..report.document import front_end
from .session import Session


def widget_of(session: Session) -> Any:
    """The page as an :class:`anywidget.AnyWidget`.

    Raises:
      UnsupportedError: anywidget is not installed.
    """
    if importlib.util.find_spec("anywidget") is None:
        raise UnsupportedError(
            "a lab in a notebook needs anywidget, which is not installed",
            fixes=["pip install 'meshpar[lab]'", "or open it in a browser: lab.serve()"],
        )
    import anywidget

    css, js = front_end("lab")

    class Page(anywidget.AnyWidget):
        _esm = js
        _css = css

    def answer(widget: Any, message: Any, buffers: Any) -> None:
        if isinstance(message, dict):
            widget.send({"number": message.get("number"), "reply": session.handle(message.get("request"))})

    page = Page()
    page.on_msg(answer)
    return page
