"""What native libraries write as they start."""

import os

import pytest

from meshpar._src.compat.compile_only_devices import _stderr_on_failure


def test_what_libtpu_writes_as_it_starts_is_kept_back(capfd):
    with _stderr_on_failure():
        os.write(2, b"no TPU here\n")
    os.write(2, b"after\n")
    assert capfd.readouterr().err == "after\n"


def test_it_is_shown_where_it_fails(capfd):
    def fails():
        with _stderr_on_failure():
            os.write(2, b"no such slice\n")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fails()
    assert capfd.readouterr().err == "no such slice\n"
