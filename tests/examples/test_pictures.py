"""The pictures of the README and the docs show the numbers that their plans have."""

import json

import pictures
import pytest


@pytest.mark.slow
def test_pictures_show_the_numbers_of_their_plans():
    assert all((pictures.HERE / name.partition(",")[0]).exists() for name in pictures.PLANS)
    assert json.loads(pictures.NUMBERS.read_text()) == {n: pictures.numbers(w) for n, w in pictures.PLANS.items()}
