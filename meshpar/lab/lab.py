"""The lab as Python has it: what the page shows now, a server for browsers, a widget for notebooks."""

from __future__ import annotations

from typing import Any

from ..plan_api import Plan
from .session import Session


class Lab:
    """A page over live plans; a notebook shows it, :meth:`serve` opens it in a browser.

    Its figures are those of :func:`meshpar.plan`: estimates. Nothing is compiled until that is asked for, and nothing is run.

    Attributes:
      session: what the pages talk to.
    """

    def __init__(self, session: Session):
        self.session = session
        self._widget: Any = None

    @property
    def mesh(self) -> str:
        """The mesh that the page shows, as text; that of the last plan that could be made."""
        return self.session.shown.mesh

    @property
    def topology(self) -> str | None:
        """Its topology."""
        return self.session.shown.topology

    @property
    def layout(self) -> str:
        """Its layout, as text for :func:`meshpar.jit`."""
        return self.session.shown.layout

    @property
    def plan(self) -> Plan:
        """Its plan."""
        return self.session.plan()

    def serve(self, port: int = 0, *, browser: bool = True, block: bool = True) -> str:
        """Serve the page to browsers of this machine, on the loopback address alone; every request needs the address's token.

        Args:
          port: 0: any that is free.
          browser: open it in the user's browser.
          block: serve until Ctrl-C; else in a thread, for as long as the process runs.

        Returns:
          The page's address, with its token.

        Raises:
          OSError: the port is taken.
        """
        import webbrowser  # with the server, 30 ms of imports that meshpar's other users need not wait for

        from .server import Server

        server = Server(self.session, port)
        print(server.url, flush=True)
        if browser:
            webbrowser.open(server.url)
        if block:
            server.run()
        else:
            server.start()
        return server.url

    def _repr_mimebundle_(self, **options: Any) -> Any:
        if self._widget is None:
            from .widget import widget_of

            self._widget = widget_of(self.session)
        return self._widget._repr_mimebundle_(**options)

    def __repr__(self) -> str:
        where = f" of {self.topology}" if self.topology else ""
        return f"<Lab of {self.session.name} on {self.mesh}{where}: {self.layout or '(nothing split)'}>"
