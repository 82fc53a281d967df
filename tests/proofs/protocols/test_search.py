"""The search visits every state once, and its stories are the shortest."""

from proofs.protocols.search import CIRCLE, STUCK, Model, search


def always(place):
    """Holds everywhere."""
    return place is not None


def walks(size, *, claim=always, ends=always, back=False):
    """A walk over a square, right or up, from one corner to the other."""

    def actions(place):
        for name, step in (("right", (1, 0)), ("up", (0, 1)), ("back", (-1, 0))):
            after = (place[0] + step[0], place[1] + step[1])
            if min(after) >= 0 and max(after) < size and (back or name != "back"):
                yield name, after

    return Model([(0, 0)], actions, {"the claim": claim}, ends)


def test_every_state_is_visited_once():
    """A square of 7 x 7 places has 49 states, the last of them 12 steps away."""
    found = search(walks(7, ends=lambda place: place == (6, 6)))

    assert (found.states, found.depth, found.broken, found.story) == (49, 12, "", ())


def test_the_story_of_a_broken_claim_is_the_shortest():
    """The place (2, 1) is three steps away, whichever way one takes."""
    found = search(walks(7, claim=lambda place: place not in {(2, 1), (6, 6)}, back=True))

    assert found.broken == "the claim"
    assert sorted(found.story) == ["right", "right", "up"]


def test_a_state_from_which_nothing_happens_must_be_an_end():
    """Otherwise somebody waits for ever."""
    found = search(walks(2, ends=lambda place: place is None))

    assert (found.broken, len(found.story)) == (STUCK, 2)


def test_a_circle_is_found():
    """Right and back again could go on for ever."""
    found = search(walks(3, back=True))

    assert found.broken == CIRCLE
    assert sorted(found.story[-2:]) == ["back", "right"]
    assert search(walks(3)).broken == ""


def test_a_start_may_break_a_claim():
    """Its story is empty."""
    found = search(walks(3, claim=lambda place: place is None))

    assert (found.broken, found.story, found.states) == ("the claim", (), 1)
