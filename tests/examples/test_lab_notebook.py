"""The notebook runs from its first cell to its last, and is committed without outputs."""

import json
from pathlib import Path

import pytest
import quick

NOTEBOOK = Path(__file__).parents[2] / "examples" / "lab.ipynb"


def test_it_is_committed_without_outputs():
    cells = json.loads(NOTEBOOK.read_text())["cells"]
    assert all(not cell.get("outputs") and cell.get("execution_count") is None for cell in cells)


@pytest.mark.slow
def test_it_runs(monkeypatch):
    nbclient = pytest.importorskip("nbclient", reason="nbclient is not installed: pip install 'meshpar[notebook]'")
    nbformat = pytest.importorskip("nbformat")
    pytest.importorskip("ipykernel", reason="ipykernel is not installed: pip install 'meshpar[notebook]'")
    pytest.importorskip("anywidget", reason="anywidget is not installed: pip install 'meshpar[lab]'")
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    monkeypatch.setenv("XLA_FLAGS", quick.FLAGS)
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    client = nbclient.NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(NOTEBOOK.parent)}})
    client.execute()
    outputs = [out for cell in notebook.cells for out in cell.get("outputs", ())]
    data = [out["data"] for out in outputs if "data" in out]
    assert any("text/html" in d and "peak memory per device" in d["text/html"] for d in data)
    assert any("application/vnd.jupyter.widget-view+json" in d for d in data)
    text = "".join(out.get("text", "") for out in outputs)
    assert "1 of 1 runs equal" in text
    assert "nats a token" in text
