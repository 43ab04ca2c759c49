"""The kernel's half of the widget."""

import lab_program
import pytest

from meshpar._src.lab.lab import widget_of
from meshpar.errors import UnsupportedError


def test_it_answers_by_number():
    pytest.importorskip("anywidget", reason="anywidget is not installed: pip install 'meshpar[lab]'")
    lab = lab_program.lab()
    page = widget_of(lab.session)
    sent = []
    page.send = sent.append
    page._handle_custom_msg({"number": 3, "request": {"ask": "open"}}, [])
    page._handle_custom_msg("noise", [])
    assert [(m["number"], m["reply"]["mesh"]) for m in sent] == [(3, lab_program.MESH)]
    shown = lab._repr_mimebundle_()
    assert "application/vnd.jupyter.widget-view+json" in (shown[0] if isinstance(shown, tuple) else shown)


def test_without_anywidget_it_says_what_to_install(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UnsupportedError, match=r"meshpar\[lab\]"):
        lab_program.lab()._repr_mimebundle_()
