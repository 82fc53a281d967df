"""What is left out by default is tried in CI, and what CI leaves out by night."""

import itertools

import pytest
from sampling import tiers


@pytest.mark.parametrize(("axes", "by_default", "in_ci"), [(2, 1, 3), (3, 3, 9), (4, 9, 27)])
def test_samples_of_a_matrix(axes, by_default, in_ci):
    """A ninth runs by default and a third in CI, in which every value of every axis is tried; of three
    axes or more, it is by default, too.
    """
    marked = list(zip(itertools.product(range(3), repeat=axes), tiers(3**axes), strict=True))
    first = [case for case, marker in marked if marker is None]
    second = [case for case, marker in marked if marker != "slow"]

    assert (len(first), len(second)) == (by_default, in_ci)
    assert {marker for _, marker in marked} == {None, "thorough", "slow"}
    assert all(set(values) == {0, 1, 2} for values in zip(*second, strict=True))
    assert axes == 2 or all(set(values) == {0, 1, 2} for values in zip(*first, strict=True))


def test_one_case_is_always_tried():
    """The first number has no marker, however few cases there are."""
    assert [tiers(cases)[0] for cases in (1, 2, 5, 100)] == [None] * 4
