"""The numbers and sentences of the page."""

import math

import numpy as np
import written_run
from written_run import GRADIENTS, SKIP, TRAIN, write_lines

from scaling.base.number_formats import HALF_MAX
from trainer.report import facts
from trainer.report.reading import read_run

MODEL = [
    {
        "name": name,
        "shape": shape,
        "dtype": "float32",
        "compute_dtype": "float16",
        "parameters": parameters,
        "bytes": 4 * parameters,
    }
    for name, shape, parameters in (("kernel", [30, 50], 1500), ("temperature", [], 1))
]


def start_line(step=0, **settings):
    """Returns the line that a run writes at its start."""
    return {"split": "run", "step": step, "time": "2026", "settings": settings, "model": MODEL}


def test_the_header(tmp_path):
    """The header shows progress, skipped steps by cause, the loss scale, the best result, and speed."""
    assert facts.tiles(read_run(written_run.write(tmp_path / "rich"))) == [
        ("step reached", "600", "ended after 12 min 34 s"),
        ("updates applied", "582", "of 600 attempted steps, at the last log line"),
        (
            "steps skipped",
            "18",
            "10 backward, 3 unscaling, 2 model, 1 forward, 1 reduction, 1 weights",
        ),
        ("loss scale at the end", "2^15", "between 2^14 and 2^24"),
        (
            "lowest validation loss",
            "0.07385",
            f"at step 600, accuracy 0.9654, {written_run.METRIC} 0.9677",
        ),
        ("examples per second", "2,611", "median of the log lines"),
        ("waiting for data", "3.0%", "of the time, on average"),
        (
            "started",
            "2026-11-22",
            "at 02:30 UTC; resumed once, last at 2026-11-22 03:10 UTC; rolled back once",
        ),
    ]


def test_the_settings_of_the_run_define_the_best_result(tmp_path):
    """They are `best_metric` and `best_is`. Without an evaluation, training results are compared."""
    start = start_line(best_metric="score", best_is="highest")
    lines = [
        {"split": "validation", "step": step, "loss": loss, "score": score}
        for step, loss, score in ((1, 3.0, 0.1), (2, 2.0, 0.9), (3, 1.0, None))
    ]

    run = read_run(write_lines(tmp_path, start, *lines))
    assert facts.best_tile(run) == ("highest validation score", "0.9", "at step 2, loss 2")
    run = read_run(write_lines(tmp_path, *lines))
    assert facts.best_tile(run) == ("lowest validation loss", "1", "at step 3")
    run = read_run(write_lines(tmp_path, TRAIN))
    assert facts.best_tile(run) == ("lowest training loss", "0.5", "at step 10")
    run = read_run(write_lines(tmp_path, SKIP))
    assert facts.best_tile(run) == ("best loss", "not recorded", "")


def test_headroom_is_the_number_of_possible_doublings(tmp_path):
    """It is exact for powers of two below 65504. A skipped step, whose magnitude is unknown, and a
    step with only zero gradients have none.
    """
    zero = GRADIENTS | {"max_magnitude": [None, HALF_MAX / 2**17, 0.0]}

    curve = facts.headroom(read_run(write_lines(tmp_path, GRADIENTS)).record)
    assert (list(curve.step), list(curve.value)) == ([2, 3], [2.0, 5.0])
    curve = facts.headroom(read_run(write_lines(tmp_path, zero)).record)
    assert (list(curve.step), list(curve.value)) == ([2], [2.0])


def test_the_recommended_scale_has_its_margin_below_what_overflowed(tmp_path):
    """It leaves four bits above the largest gradient of the run, and below the best fixed scale: how
    large the gradients of a step were that overflowed is not known. None if no step was applied.
    """
    whole = GRADIENTS | {"cause": ["none"] * 3, "max_magnitude": [HALF_MAX / 2**17] * 3}
    advice = facts.advise(read_run(write_lines(tmp_path, whole)).record)
    assert advice[:3] == ("2^13", f"{HALF_MAX / 2**17:.3g}", False)
    assert advice.best_fixed == "2^17"

    advice = facts.advise(read_run(write_lines(tmp_path, GRADIENTS)).record)
    largest = f"{HALF_MAX / 2**17:.3g}"

    # The largest known gradient fits at 2^17, but a step overflowed at 2^16. Four bits below 2^15, at
    # 2^11, one of four elements is lost: 2^-40.
    assert advice == ("2^11", largest, True, "25.00%", "2^15", True, 1)
    nothing = GRADIENTS | {"cause": ["backward"] * 3, "max_magnitude": [None] * 3}
    assert facts.advise(read_run(write_lines(tmp_path, nothing)).record) is None


def test_settings_that_changed_show_their_first_value(tmp_path):
    """The table has the settings of the last start, and the first value only where it differs."""
    lines = [start_line(seed=1, note=None), start_line(10, seed=0, note=None, new="a")]
    run = read_run(write_lines(tmp_path, *lines))

    assert facts.settings_rows(run) == [("seed", "0", "1"), ("note", "None", ""), ("new", "a", "")]
    assert facts.settings_rows(read_run(write_lines(tmp_path, TRAIN))) == []


def test_values_that_were_not_recorded():
    """NaN values are ignored, and a curve without any value has no last value, median or mean."""
    curve = facts.Curve(np.arange(4), np.array([1.0, 2.0, 6.0, math.nan]))
    empty = facts.Curve(np.arange(1), np.array([math.nan]))

    assert [function(curve) for function in (facts.last, facts.median, facts.mean)] == [6, 2, 3]
    for missing in (empty, None):
        assert all(math.isnan(f(missing)) for f in (facts.last, facts.median, facts.mean))
