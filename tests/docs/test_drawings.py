"""The drawings in docs/static are those that docs/drawings.py makes."""

import drawings
import pytest


@pytest.mark.parametrize("name", drawings.DRAWINGS)
def test_a_stored_drawing_is_current(name):
    assert (drawings.FOLDER / name).read_text() == drawings.DRAWINGS[name]()


def test_a_sharded_tensor_has_one_rectangle_for_each_distinct_shard():
    import meshpar as mp

    lines = drawings.tensor("embed mlp", (16, 32), mp.Layout("embed: data"), 0, 0, 5)
    assert [line.split(">")[1].split("<")[0] for line in lines if '#ffffff">' in line] == ["0 1", "2 3", "4 5", "6 7"]
    assert sum(line.startswith("<rect") for line in lines) == 4
