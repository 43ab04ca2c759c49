"""The notebook runs from its first cell to its last, and is committed with its outputs as a code host shows them."""

import json
import re

import blocks
import pytest
import quick

CELLS = [cell for cell in json.loads(blocks.NOTEBOOK.read_text())["cells"] if cell["cell_type"] == "code"]


PRINTS = [k for k, cell in enumerate(CELLS) if cell["outputs"]]


def text_of(cell):
    """The printed text of a cell."""
    return "".join("".join(out["text"]) for out in cell["outputs"])


def test_it_is_committed_with_the_outputs_of_a_complete_run():
    assert [cell["execution_count"] for cell in CELLS] == list(range(1, len(CELLS) + 1))
    assert len(CELLS) - len(PRINTS) == 2  # a page and the lab, which a live notebook shows
    assert {out["output_type"] for cell in CELLS for out in cell["outputs"]} == {"stream"}
    assert "\x1b" not in "".join(map(text_of, CELLS))
    assert "nats a token" in text_of(CELLS[-1])


@pytest.mark.slow
def test_it_runs_and_prints_what_is_stored(monkeypatch):
    pytest.importorskip("nbclient", reason="nbclient is not installed: pip install 'meshpar[notebook]'")
    pytest.importorskip("ipykernel", reason="ipykernel is not installed: pip install 'meshpar[notebook]'")
    pytest.importorskip("anywidget", reason="anywidget is not installed: pip install 'meshpar[lab]'")
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    monkeypatch.setenv("XLA_FLAGS", quick.FLAGS)
    ran = [cell for cell in blocks.executed(blocks.NOTEBOOK).cells if cell.cell_type == "code"]
    varies = [k for k, cell in enumerate(CELLS) if cell["metadata"].get("tags") == ["varies"]]
    assert len(varies) == 1  # the compiler may not be installed
    assert [k for k, cell in enumerate(ran) if cell.outputs] == PRINTS
    for k in set(PRINTS) - set(varies):
        assert re.sub(blocks.ROUNDING, "…", text_of(ran[k])) == re.sub(blocks.ROUNDING, "…", text_of(CELLS[k]))
