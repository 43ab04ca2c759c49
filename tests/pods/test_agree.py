"""Several processes: the numbers of one, and an error with the process, the field and both values where they differ."""

import numpy as np
import pod_programs as programs
import pytest


def close(a, b, tolerance):
    for x, y in zip(a, b, strict=True):
        np.testing.assert_allclose(np.asarray(x), np.asarray(y), rtol=tolerance, atol=tolerance)


@pytest.fixture(scope="module")
def alone(pods):
    """One process with the same four devices."""
    end = pods.run(1, programs.results_of_all)
    assert end.codes == [0], end.texts
    return end.results[0]


def test_results_equal_those_of_one_process(pods, alone):
    """Losses and states of every scheme; arguments of NumPy, of one process, and over all processes."""
    end = pods.run(2, programs.results_of_all)
    assert end.codes == [0, 0], end.texts
    for schemes, arguments in end.results:
        for name, (losses, state) in alone[0].items():
            close(schemes[name][0], losses, 1e-6)
            close(schemes[name][1], state, 1e-6)
        close(arguments, alone[1], 1e-6)
        close(arguments[1:3], [arguments[0]] * 2, 0)
        assert arguments == end.results[0][1]


@pytest.mark.slow
def test_check_and_compile(pods):
    one, two = (pods.run(n, programs.check_and_compile, env={"MESHPAR_COMPILES": "8"}) for n in (1, 2))
    assert (one.codes, two.codes) == ([0], [0, 0]), two.texts
    assert one.results[0][:2] == [True, 1]
    assert two.results == [one.results[0]] * 2


def test_a_mesh_that_leaves_a_process_out(pods):
    end = pods.run(2, programs.leave_one_out)
    assert end.codes == [0, 0], end.texts
    assert "mesh (data=2) has 2 of 4 devices, and none of process 1" in end.results[0]


WANT = {  # what differs → field, and what must stand in the rows of process 0 and of the other
    "program": ("program", "", ""),
    "seed": ("values", "uint32[0, 0]", "uint32[0, 1]"),
    "data": ("values", "x: float32[8, 16]", "x: float32[8, 16]"),
    "local": ("values", "state/params/down", "state/params/down"),
    "replicas": ("replicas", "state/params/down", "state/params/down"),
}


@pytest.mark.parametrize("what", WANT)
def test_a_difference_is_an_error_that_names_it(pods, what):
    """Between processes; ``test_agree_facts.py`` has every field."""
    field, mine, theirs = WANT[what]
    end = pods.run(2, programs.differ, what, 1)
    assert end.codes == [1, 1], end.texts
    for text in end.texts:
        assert "AgreementError" in text or "ends because of process" in text
    text = next(t for t in end.texts if "AgreementError: " in t and "  process 1 " in t)
    assert ("processes 0,1 hold copies of" if field == "replicas" else f"the {field} of") in text
    rows = {line.split()[1]: line for line in text.splitlines() if line.startswith("  process ")}
    assert mine in rows["0"]
    assert theirs in rows["1"]
    assert rows["0"].split("  ", 3)[-1] != rows["1"].split("  ", 3)[-1]


def test_other_data_of_equal_length(pods):
    end = pods.run(2, programs.read_other_data, 1)
    assert end.codes == [1, 1], end.texts
    text = next(t for t in end.texts if "AgreementError: the processes disagree about the data" in t)
    assert "process 1  seed=0, batch=8, rows=64, last=drop, order=feistel-4: " in text


def test_the_odd_one_of_four_is_named(pods):
    end = pods.run(4, programs.differ, "layout", 2)
    assert end.codes == [1] * 4, end.texts
    text = next(t for t in end.texts if "AgreementError: the processes" in t)
    assert "process 2  batch: data; mlp: model" in text
