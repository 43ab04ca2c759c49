"""Several processes: the numbers of one, and an error with the process, the field and both values where they differ."""

import numpy as np
import pod_programs as programs
import pytest


def close(a, b, tolerance):
    for x, y in zip(a, b, strict=True):
        np.testing.assert_allclose(np.asarray(x), np.asarray(y), rtol=tolerance, atol=tolerance)


def test_results_equal_those_of_one_process(pods):
    """Losses and states of two schemes; arguments of NumPy, of one process, and over all processes."""
    alone = programs.results_of_all()  # on four devices of this process
    end = pods.run(2, programs.results_of_all)
    assert end.codes == [0, 0], end.texts
    for schemes, arguments, error in end.results:
        for name, (losses, state) in alone[0].items():
            close(schemes[name][0], losses, 1e-6)
            close(schemes[name][1], state, 1e-6)
        close(arguments, alone[1], 1e-6)
        close(arguments[1:3], [arguments[0]] * 2, 0)
        assert arguments == end.results[0][1]
        assert "mesh (data=2) has 2 of 4 devices, and none of process 1" in error


@pytest.mark.slow
def test_check_and_compile(pods, monkeypatch):
    monkeypatch.setenv("MESHPAR_COMPILES", "8")
    alone = programs.check_and_compile()
    end = pods.run(2, programs.check_and_compile, env={"MESHPAR_COMPILES": "8"})
    assert end.codes == [0, 0], end.texts
    assert alone[:2] == [True, 1]
    assert end.results == [alone] * 2


@pytest.mark.parametrize(
    ("what", "head", "mine", "theirs"),
    [
        ("seed", "the values of", "uint32[0, 0]", "uint32[0, 1]"),
        ("replicas", "processes 0,1 hold copies of", "state/params/down", "state/params/down"),
    ],
)
def test_a_difference_is_an_error_that_names_it(pods, what, head, mine, theirs):
    """Between processes; ``test_agree_facts.py`` has every field."""
    end = pods.run(2, programs.differ, what, 1)
    assert end.codes == [1, 1], end.texts
    for text in end.texts:
        assert "AgreementError" in text or "ends because of process" in text
    text = next(t for t in end.texts if "AgreementError: " in t and "  process 1 " in t)
    assert head in text
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
