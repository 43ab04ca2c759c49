"""The notebook runs from its first cell to its last, and is committed with its outputs as a code host shows them."""

import json

import blocks
import pytest
import quick

CELLS = [cell for cell in json.loads(blocks.NOTEBOOK.read_text())["cells"] if cell["cell_type"] == "code"]


def text_of(cell):
    """The printed and the plain text of a cell's outputs."""
    outputs = cell["outputs"]
    return "".join("".join(out.get("text", out.get("data", {}).get("text/plain", ""))) for out in outputs)


def test_it_is_committed_with_the_outputs_of_a_complete_run():
    assert [cell["execution_count"] for cell in CELLS] == list(range(1, len(CELLS) + 1))
    kinds = {kind for cell in CELLS for out in cell["outputs"] for kind in out.get("data", ())}
    assert kinds == {"text/plain", "image/png"}
    assert "nats a token" in text_of(CELLS[-1])


@pytest.mark.slow
def test_it_runs_and_prints_what_is_stored(monkeypatch):
    pytest.importorskip("nbclient", reason="nbclient is not installed: pip install 'meshpar[notebook]'")
    pytest.importorskip("ipykernel", reason="ipykernel is not installed: pip install 'meshpar[notebook]'")
    pytest.importorskip("anywidget", reason="anywidget is not installed: pip install 'meshpar[lab]'")
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    monkeypatch.setenv("XLA_FLAGS", quick.FLAGS)
    ran = [cell for cell in blocks.executed(blocks.NOTEBOOK).cells if cell.cell_type == "code"]
    varies = [cell["metadata"].get("tags") == ["varies"] for cell in CELLS]
    assert sum(varies) == 1  # the compiler may not be installed
    stored = [text_of(cell) for cell, skip in zip(CELLS, varies, strict=True) if not skip]
    assert [text_of(cell) for cell, skip in zip(ran, varies, strict=True) if not skip] == stored
    assert any("image/png" in out.get("data", ()) for cell in ran for out in cell.outputs)
