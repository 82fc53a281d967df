"""How tests are marked: those of laws, and the cases of a large matrix by when they are tried."""

import re

import numpy as np

LAW = re.compile(r"\b(L[0-9]+)(?=:|, L|, the other side:| and L| to L| for )")


def laws_of(docstring):
    """Returns the numbers of the laws that a test shows, such as ["L5", "L6"] for "L5, L6: ..."."""
    return LAW.findall(docstring or "")


def tiers(cases):
    """Returns the marker of each case of a matrix: None, "thorough" or "slow".

    About a ninth is tried by default, a third in CI, and all by night. The numbers of the cases are
    written in base 3. A third are those whose digits sum up to a multiple of 3, and a ninth those of
    them whose digits, times their places, do so too. So of a matrix of three or more axes of three
    values, every value is tried by default; of a matrix of two, in CI.

    Args:
        cases: the number of cases.
    """
    return [tier(case) for case in range(cases)]


def tier(case):
    """Returns the marker of a case by its number, from 0."""
    digits = [int(digit) for digit in reversed(np.base_repr(case, 3))]
    if sum(digits) % 3:
        return "slow"
    return "thorough" if sum(place * digit for place, digit in enumerate(digits)) % 3 else None
