"""HTTP server of a lab for browsers of this machine: bound to loopback, and every request needs the token."""

from __future__ import annotations

import hmac
import json
import secrets
import sys
import threading
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

from ..report.document import front_end, html_document
from .session import Session

HOST = "127.0.0.1"
MAX_REQUEST_BYTES = 1 << 20


class Server(ThreadingHTTPServer):
    """Serves one session.

    Attributes:
      token: the secret of every request: in the address of a page, in a header of other requests.
      names: the values of the Host header that are accepted.
      url: the address of the page, with the token.

    Raises:
      OSError: the port is taken.
    """

    daemon_threads = True
    request_queue_size = 128  # connections that wait to be accepted; a further one is tried again after a second

    def __init__(self, session: Session, port: int = 0):
        super().__init__((HOST, port), _Handler)
        self.session, self.token = session, secrets.token_urlsafe(32)
        self.names = {f"{name}:{self.server_port}" for name in (HOST, "localhost")}
        self.url = f"http://{HOST}:{self.server_port}/?token={self.token}"

    def run(self) -> None:
        """Serve until Ctrl-C."""
        try:
            self.serve_forever()
        except KeyboardInterrupt:
            pass
        finally:
            self.server_close()

    def start(self) -> None:
        """Serve in a background thread."""
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def stop(self) -> None:
        """Stop a server that :meth:`start` started."""
        self.shutdown()
        self.server_close()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore connections that browsers close; report other errors."""
        if not isinstance(sys.exc_info()[1], ConnectionError):
            super().handle_error(request, client_address)

    def page(self, nonce: str) -> str:
        """The text of the HTML page with its style and script inline; the script element has the nonce of the
        Content-Security-Policy."""
        css, js = front_end("lab")
        script = f'<script type="module" nonce="{nonce}">{js}\nserved();</script>'
        title = f"meshpar lab: {self.session.title}"
        return html_document(title, css, f'<main class="mp page lab"></main>{script}')


class _Handler(BaseHTTPRequestHandler):
    """Answers GET / with the page, and POST /ask with the session's reply to a JSON request."""

    protocol_version = "HTTP/1.1"
    timeout = 60

    @property
    def _lab(self) -> Server:
        assert isinstance(self.server, Server)
        return self.server

    def do_GET(self) -> None:
        """Send the page, with a content security policy that allows only its own script."""
        where = urlsplit(self.path)
        if not self._allowed((parse_qs(where.query).get("token") or [""])[0]):
            return
        if where.path != "/":
            self._send(HTTPStatus.NOT_FOUND, "page not found")
            return
        nonce = secrets.token_urlsafe(16)
        policy = (
            f"default-src 'none'; script-src 'nonce-{nonce}'; style-src 'unsafe-inline'; connect-src 'self'; img-src data:; "
            "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
        )
        self._send(HTTPStatus.OK, self._lab.page(nonce), "text/html", {"Content-Security-Policy": policy})

    def do_POST(self) -> None:
        """Answer a JSON request of a page."""
        scheme, _, token = (self.headers.get("Authorization") or "").partition(" ")
        if not self._allowed(token if scheme == "Bearer" else ""):
            return
        origin = self.headers.get("Origin")
        if origin is not None and urlsplit(origin).netloc not in self._lab.names:
            self._refuse(HTTPStatus.FORBIDDEN, "the request is from another origin")
            return
        length = self.headers.get("Content-Length") or ""
        if not length.isdigit() or int(length) > MAX_REQUEST_BYTES:
            text = f"a request needs a Content-Length of at most {MAX_REQUEST_BYTES} bytes"
            self._refuse(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, text)
            return
        body = self.rfile.read(int(length))
        if self.path != "/ask":
            self._send(HTTPStatus.NOT_FOUND, "page not found")
            return
        try:
            request = json.loads(body)
        except (ValueError, RecursionError):
            self._send(HTTPStatus.BAD_REQUEST, "the request is not JSON, or too deeply nested")
            return
        self._send(HTTPStatus.OK, json.dumps(self._lab.session.handle(request)), "application/json")

    def _allowed(self, token: str) -> bool:
        """Whether the Host header is the loopback address and the token is the server's; if not, sends 403 Forbidden
        and returns False.

        Args:
          token: the token in the request; "" if it has none.
        """
        # another host is DNS rebinding: a name that another site resolves to this machine
        if self.headers.get("Host") not in self._lab.names:
            self._refuse(HTTPStatus.FORBIDDEN, "this server accepts only its loopback address as host")
            return False
        if not hmac.compare_digest(token.encode(), self._lab.token.encode()):
            self._refuse(HTTPStatus.FORBIDDEN, "the token is missing or wrong: use the address that was printed")
            return False
        return True

    def _refuse(self, status: HTTPStatus, text: str) -> None:
        """Send an error and close the connection, since the body of the request is not read."""
        self.close_connection = True
        self._send(status, text)

    def _send(
        self, status: HTTPStatus, text: str, kind: str = "text/plain", headers: dict[str, str] | None = None
    ) -> None:
        """Send a response with headers that forbid caching."""
        body = text.encode()
        self.send_response(status)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        common = {"Cache-Control": "no-store", "Referrer-Policy": "no-referrer", "X-Content-Type-Options": "nosniff"}
        for name, value in {**common, **(headers or {})}.items():
            self.send_header(name, value)
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing: addresses contain the token."""
