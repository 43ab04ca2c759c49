"""The lab's server: loopback alone, a token with every request, no other site's pages, nothing but JSON in."""

import contextlib
import http.client
import json
import socket
from urllib.parse import urlsplit

import lab_program
import pytest

from meshpar._src.lab.server import MAX_REQUEST_BYTES, Server


@pytest.fixture(scope="module")
def server():
    server = Server(lab_program.lab().session)
    server.start()
    yield server
    server.stop()


def send(server, method="POST", path="/ask", body=b'{"ask": "open"}', **headers):
    given = {"Authorization": f"Bearer {server.token}", **{k.replace("_", "-"): v for k, v in headers.items()}}
    given = {k: v for k, v in given.items() if v is not None}
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=20)) as connection:
        connection.request(method, path, body if method == "POST" else None, given)
        reply = connection.getresponse()
        return reply.status, reply.read().decode(), reply.headers


def test_a_page_and_an_answer(server):
    where = urlsplit(server.url)
    status, text, headers = send(server, "GET", f"{where.path}?{where.query}", Authorization=None)
    assert status == 200
    assert headers["Content-Type"].startswith("text/html")
    assert "'unsafe-eval'" not in headers["Content-Security-Policy"]
    assert server.token not in text
    assert "http://" not in text
    assert "https://" not in text
    status, text, _ = send(server)
    assert status == 200
    assert json.loads(text)["mesh"] == lab_program.MESH


@pytest.mark.parametrize("token", [None, "", "Bearer", "Bearer wrong", "Basic {}", "{}", "Bearer {}x", "Bearer ü"])
def test_nothing_without_the_token(server, token):
    token = token and token.format(server.token)
    status, text, _ = send(server, Authorization=token)
    assert status == 403
    assert server.token not in text
    assert send(server, "GET", "/", Authorization=token)[0] == 403
    assert send(server, "GET", "/?token=wrong")[0] == 403


def test_its_own_pages_alone_may_ask(server):
    for headers in (
        {"Host": "evil.example"},
        {"Host": "127.0.0.1"},
        {"Origin": "http://evil.example"},
        {"Origin": "null"},
    ):
        assert send(server, **headers)[0] == 403
    assert send(server, Origin=f"http://127.0.0.1:{server.server_port}")[0] == 200
    assert send(server, Host=f"localhost:{server.server_port}")[0] == 200


def test_it_listens_on_loopback_alone(server):
    assert server.server_address[0] == "127.0.0.1"
    others = {info[4][0] for info in socket.getaddrinfo(socket.gethostname(), None, socket.AF_INET)} - {"127.0.0.1"}
    for address in others:
        if not address.startswith("127."):
            with contextlib.closing(socket.socket()) as other:
                other.settimeout(2)
                assert other.connect_ex((address, server.server_port)) != 0


def test_bad_requests(server):
    assert send(server, body=b"no JSON")[0] == 400
    assert send(server, body=b"\xff\xfe")[0] == 400
    assert send(server, body=b"[" * 100_000)[0] == 400
    assert send(server, body=b'{"ask": ' + b"[" * 100_000)[0] == 400
    for body in (b'{"ask": ["open"]}', b'{"ask": {}}', b'{"ask": null}', b"[]", b"3"):
        assert json.loads(send(server, body=body)[1])["failed"]
    assert send(server, path="/other")[0] == 404
    assert send(server, "GET", f"/../etc/passwd?token={server.token}")[0] == 404
    assert send(server, Content_Length=str(MAX_REQUEST_BYTES + 1))[0] == 413
    assert send(server, Content_Length="-1")[0] == 413
    assert send(server, "PUT")[0] == 501
    assert "failed" in json.loads(send(server, body=b'{"ask": "eval", "text": "1"}')[1])
    assert send(server)[0] == 200  # it goes on


def test_many_connections_at_once_are_not_refused():
    """The operating system completes connections that the server has not accepted yet; it does not serve here."""
    server = Server(lab_program.lab().session)
    with contextlib.ExitStack() as opened:
        opened.callback(server.server_close)
        for _ in range(100):
            opened.enter_context(socket.create_connection(server.server_address, timeout=0.5))


def test_a_server_in_a_thread(capsys):
    url = lab_program.lab().serve(browser=False, block=False)
    assert url in capsys.readouterr().out
    with contextlib.closing(http.client.HTTPConnection(urlsplit(url).netloc, timeout=20)) as connection:
        connection.request("GET", url[url.index("/?") :])
        assert connection.getresponse().status == 200


def test_the_address_and_the_session_as_json(capsys):
    lab = lab_program.lab()
    url = lab.serve(browser=False, block=False, as_json=True)
    (line,) = capsys.readouterr().out.splitlines()
    printed = json.loads(line)
    assert printed["address"] == url
    session = printed["session"]
    assert (session["mesh"], session["topology"]) == (lab_program.MESH, lab_program.TOPOLOGY)
    assert session["layout"].split("; ") == lab_program.RULES
    assert dict(session["dims"])["batch"] == [lab_program.X.shape[0]]
