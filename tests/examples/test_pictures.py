"""The pictures of the README and the docs show the numbers that their plans have."""

import json

import pictures
import pytest


@pytest.mark.slow
@pytest.mark.parametrize("name", pictures.PICTURES)
def test_a_picture_shows_the_numbers_of_its_plan(name):
    assert (pictures.HERE / name).exists()
    assert json.loads(pictures.NUMBERS.read_text())[name] == pictures.numbers(pictures.PICTURES[name])


def test_a_stale_picture_is_reported(monkeypatch, tmp_path, capsys):
    stored = tmp_path / "pictures.json"
    stored.write_text(json.dumps({name: {"seconds": "1"} for name in pictures.PICTURES}))
    monkeypatch.setattr(pictures, "NUMBERS", stored)
    monkeypatch.setattr(pictures, "numbers", lambda picture: {"seconds": "1" if picture.lab else "2"})
    monkeypatch.setattr("sys.argv", ["pictures.py", "--check"])
    assert pictures.main() == 1
    assert capsys.readouterr().err == "plan.png shows {'seconds': '1'}; its plan has {'seconds': '2'}\n"
