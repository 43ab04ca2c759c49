"""The pictures of the README and the docs show the numbers that their plans have."""

import json

import pictures
import pytest


@pytest.mark.slow
@pytest.mark.parametrize("name", pictures.PLANS)
def test_a_picture_shows_the_numbers_of_its_plan(name):
    assert (pictures.HERE / name.partition(",")[0]).exists()
    assert json.loads(pictures.NUMBERS.read_text())[name] == pictures.numbers(pictures.PLANS[name])
