"""The lab in Python: the plan that the page shows, a server for browsers, a widget for notebooks."""

from __future__ import annotations

import importlib.util
import json
from typing import Any

from ...errors import UnsupportedError
from ..layout import UNSHARDED
from ..plan_api import Plan
from ..report.document import front_end
from .session import Session


class Lab:
    """An interactive page of plans. A notebook displays it; :meth:`serve` opens it in a browser.

    Its numbers are the estimates of :func:`meshpar.plan`. Nothing is compiled unless requested, and nothing is run.

    Attributes:
      session: it answers the requests of pages.
    """

    def __init__(self, session: Session):
        self.session = session
        self._widget: Any = None

    @property
    def mesh(self) -> str:
        """The mesh of the last valid plan of the page, as text."""
        return self.session.shown.mesh

    @property
    def topology(self) -> str | None:
        """The topology of this plan."""
        return self.session.shown.topology

    @property
    def layout(self) -> str:
        """The layout of this plan, as text for :func:`meshpar.jit`."""
        return self.session.shown.layout

    @property
    def plan(self) -> Plan:
        """The last valid plan of the page."""
        return self.session.plan()

    def serve(self, port: int = 0, *, browser: bool = True, block: bool = True, as_json: bool = False) -> str:
        """Serve the page on the loopback address, to browsers of this machine; requests need the token in the page's address.

        Args:
          port: 0: any free port.
          browser: open it in the user's browser.
          block: serve until Ctrl-C; else in a thread, for as long as the process runs.
          as_json: print the address and the session (target, mesh, layout, sizes, …) as one line of JSON, not the address alone.

        Returns:
          The page's address, with its token.

        Raises:
          OSError: the port is taken.
        """
        import webbrowser  # with the server 30 ms of imports, which only this needs

        from .server import Server

        server = Server(self.session, port)
        state = {"address": server.url, "session": self.session.handle({"ask": "open"})}
        print(json.dumps(state) if as_json else server.url, flush=True)
        if browser:
            webbrowser.open(server.url)
        if block:
            server.run()
        else:
            server.start()
        return server.url

    def _repr_mimebundle_(self, **options: Any) -> Any:
        """The MIME bundle of the widget that displays the lab in a notebook; the widget is created by the first call."""
        if self._widget is None:
            self._widget = widget_of(self.session)
        return self._widget._repr_mimebundle_(**options)

    def __repr__(self) -> str:
        where = f" of {self.topology}" if self.topology else ""
        return f"<Lab of {self.session.name} on {self.mesh}{where}: {self.layout or UNSHARDED}>"


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
