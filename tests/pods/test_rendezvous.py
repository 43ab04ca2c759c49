"""The start of a job: a process that does not arrive, a taken port, contradictory numbers and bad variables are named errors."""

import contextlib
import json
import socket
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import pod_programs as programs
import pytest

import meshpar as mp
from meshpar._src.pods import rendezvous, start
from meshpar._src.pods.rendezvous import ended_file, meet


@pytest.fixture
def port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def run(port: int, numbers: list[tuple[int, int]], wait: float = 20.0):
    """The results of :func:`meet` of processes (number, number of processes), in threads."""

    def one(p: int, count: int):
        end = meet(f"127.0.0.1:{port}", count, p, wait)
        if p == 0 and end is None:
            with socket.create_server(("127.0.0.1", port)):  # in place of JAX's service
                time.sleep(0.5)
        return end

    with ThreadPoolExecutor(len(numbers)) as pool:
        return [f.result() for f in [pool.submit(one, p, n) for p, n in numbers]]


def test_other_connections_do_not_count(port):
    def disturb():
        lines = b"", b"GET / HTTP/1.1\r\n\r\n", b"{}\n", b'{"process": "a"}\n', b'{"pro'
        for said in (*lines, b"[" * 4000 + b"\n", b"x" * 9000):
            for _ in range(100):
                try:
                    other = socket.create_connection(("127.0.0.1", port), timeout=5)
                    break
                except OSError:
                    time.sleep(0.02)
            other.sendall(said)
            opened.append(other)
        # a process that connects and then dies may arrive again
        lost = socket.create_connection(("127.0.0.1", port))
        lost.sendall(b'{"process": 1, "processes": 3}\n')
        time.sleep(0.2)
        lost.close()

    opened: list[socket.socket] = []
    with ThreadPoolExecutor(3) as pool:
        first = pool.submit(meet, f"127.0.0.1:{port}", 3, 0, 20.0)
        pool.submit(disturb).result()
        time.sleep(0.3)
        others = [pool.submit(meet, f"127.0.0.1:{port}", 3, p, 20.0) for p in (1, 2)]
        assert first.result() is None
        with socket.create_server(("127.0.0.1", port)):
            assert [f.result() for f in others] == [None, None]
    for other in opened:
        other.close()


def test_a_process_that_does_not_arrive_is_named_by_all(port):
    began = time.monotonic()
    ends = run(port, [(0, 4), (1, 4), (3, 4)], wait=1.0)
    assert [(e.process, e.kind, e.status) for e in ends] == [(2, "absent", 75)] * 3
    assert ends[0].text == "process 2 of 4 did not connect to process 0 within 1 s"
    (alone,) = run(port, [(2, 4)], wait=0.5)
    assert alone.process == 0
    assert alone.text == f"process 2 of 4 has waited 0 s for process 0 at 127.0.0.1:{port}: Connection refused"
    assert time.monotonic() - began < 30


@pytest.mark.parametrize(
    ("reply", "says"), [(b"", "it does not report"), (b"HTTP/1.1 400 Bad\r\n", "it replies b'HTTP/1.1")]
)
def test_another_server_at_the_port(port, monkeypatch, reply, says):
    monkeypatch.setattr(rendezvous, "REPLY_SECONDS", 0.1)
    with socket.create_server(("127.0.0.1", port)) as other, ThreadPoolExecutor(1) as pool:
        first = meet(f"127.0.0.1:{port}", 2, 0, 5.0)
        assert first is not None
        assert (first.process, first.kind, first.status) == (0, "port", 75)
        assert f"127.0.0.1:{port}: Address already in use" in first.text
        end = pool.submit(meet, f"127.0.0.1:{port}", 2, 1, 0.5)
        other.settimeout(0.1)
        accepted = []
        while not end.done():
            with contextlib.suppress(TimeoutError):
                accepted.append(other.accept()[0])
                accepted[-1].sendall(reply)
        cause = end.result()
        for connection in accepted:
            connection.close()
    assert cause is not None
    assert says in cause.text


@pytest.mark.parametrize(
    ("numbers", "says"),
    [
        ([(0, 3), (1, 2)], "process 1 was started as one of 2 processes, and process 0 as one of 3"),
        ([(0, 3), (1, 3), (1, 3)], "two processes were started as process 1 of 3"),
    ],
)
def test_numbers_that_contradict_each_other(port, numbers, says):
    ends = run(port, numbers, wait=5.0)
    assert [(e.text, e.process, e.kind, e.status) for e in ends] == [(says, 1, "disagreed", 1)] * len(numbers)


@pytest.mark.parametrize("absent", [0, 1])
def test_a_process_that_ended_before(port, tmp_path, monkeypatch, absent):
    monkeypatch.setenv("MESHPAR_CAUSES", str(tmp_path))
    ended_file(tmp_path, absent).touch()
    (cause,) = run(port, [(1 - absent, 2)])
    assert (cause.process, cause.kind, cause.status) == (absent, "ended", 1)
    assert "ended, with exit status 0, before it called mp.distributed()" in cause.text


BAD_VARIABLES = [
    ({"MESHPAR_PROCESSES": "two"}, "MESHPAR_PROCESSES is 'two': an integer, at least 1"),
    ({"MESHPAR_PROCESSES": "1.5"}, "MESHPAR_PROCESSES is '1.5': an integer"),
    ({"MESHPAR_PROCESSES": None}, "MESHPAR_PROCESS is set, but MESHPAR_PROCESSES is not"),
    ({"MESHPAR_PROCESS": "-1"}, "MESHPAR_PROCESS is '-1'"),
    ({"MESHPAR_PROCESS": "2"}, "MESHPAR_PROCESS=2 with MESHPAR_PROCESSES=2: processes are numbered from 0 to 1"),
    ({"MESHPAR_COORDINATOR": "10.0.0.1"}, "MESHPAR_COORDINATOR='10.0.0.1' is not host:port"),
    ({"MESHPAR_COORDINATOR": "10.0.0.1:70000"}, "is not host:port"),
    ({"MESHPAR_TIMEOUT": "soon"}, "MESHPAR_TIMEOUT is 'soon': a number"),
    ({"MESHPAR_TIMEOUT": "nan"}, "MESHPAR_TIMEOUT is 'nan'"),
    ({"MESHPAR_STUCK": "0"}, "MESHPAR_STUCK is '0': a number, at least 0.1"),
    ({"MESHPAR_DEVICES": "many"}, "MESHPAR_DEVICES is 'many'"),
]

BAD_ARGUMENTS = [
    ({"process": 1, "processes": 2}, "needs coordinator=, processes= and process=, or none"),
    ({"process": 1, "processes": 2, "coordinator": "here"}, "coordinator='here' is not host:port"),
    ({"process": 2, "processes": 2, "coordinator": "h:1"}, "process=2 with processes=2"),
]


BAD = [*((v, {}, s) for v, s in BAD_VARIABLES), *(({}, a, s) for a, s in BAD_ARGUMENTS)]


@pytest.mark.parametrize(("variables", "arguments", "says"), BAD)
def test_bad_variables_and_arguments_are_named(monkeypatch, variables, arguments, says):
    monkeypatch.setattr(start, "_started", [])
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    good = {"MESHPAR_PROCESS": "1", "MESHPAR_PROCESSES": "2", "MESHPAR_COORDINATOR": "127.0.0.1:1"}
    for name, value in {**good, **variables}.items():
        monkeypatch.delenv(name, raising=False) if value is None else monkeypatch.setenv(name, value)
    with pytest.raises(mp.errors.MeshError) as error:
        mp.distributed(wait=0.1, **arguments)
    assert says in str(error.value)


@pytest.mark.parametrize(
    ("taken", "process", "error"),
    [
        (False, 1, "LostProcessError: process 1 of 2 has waited 1 s"),
        (True, 0, "LostProcessError: process 0 cannot listen"),
    ],
)
def test_exit_statuses_of_a_script(pods, port, tmp_path, taken, process, error):
    env = {"MESHPAR_PROCESS": str(process), "MESHPAR_PROCESSES": "2", "MESHPAR_CAUSES": str(tmp_path)}
    with socket.socket() as other:
        if taken:
            other.bind(("127.0.0.1", port))
            other.listen()
        end = pods.run(1, programs.wait_here, wait=1.0, env={**env, "MESHPAR_COORDINATOR": f"127.0.0.1:{port}"})
    assert end.codes == [75], end.texts
    assert error in end.texts[0]
    assert json.loads((tmp_path / f"cause-{process}.json").read_text())["text"].startswith("LostProcessError: ")
