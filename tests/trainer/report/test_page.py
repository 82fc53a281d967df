"""The page of a run: what is read, what is said and drawn of it, and what a browser shows."""

import base64
import json
import math
import os
import pathlib
import re
import struct
import subprocess
import sys

import numpy as np
import pytest
import written_run
from absl import app, flags
from absl.testing import flagsaver
from helpers import STEEP, overflowing

from scaling import Cause
from scaling.base.number_formats import HALF_MAX
from scaling.telemetry.record import read_record
from trainer.report import facts, heat, pictures, write_report
from trainer.report.__main__ import main
from trainer.report.reading import read_run

HEADINGS = [
    "Loss and metrics",
    "Loss scale",
    "Headroom",
    "Underflow",
    "Gradient norm",
    "Recommended scale",
    "Skipped steps",
    "Settings",
    "Model",
]
TRAIN = {"split": "train", "step": 10, "loss": 0.5, "loss_scale": 2.0**15}
TRAIN |= {"gradient_norm": 2.0, "applied": 9, "skipped": 1}
GRADIENTS = {"split": "gradients", "step": 3, "precision": "mixed_float16", "shares": 1}
GRADIENTS |= {"loss_scale": [2.0**16, 2.0**15, 2.0**15], "cause": ["backward", "none", "none"]}
GRADIENTS |= {"max_magnitude": [None, HALF_MAX / 2**17, HALF_MAX / 2**20], "zeros": 0}
GRADIENTS |= {"exponents": {"-1": 3, "-40": 1}}
SKIP = {"split": "skip", "step": 1, "loss_scale": 2.0**16, "cause": "backward"}
SKIP |= {"variable": "a/kernel", "replica": 0, "inf_count": 3, "nan_count": 0}


def written(folder, *lines):
    """A run's folder with these lines; a text is written as it is."""
    texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    folder.mkdir(exist_ok=True)
    (folder / "metrics.jsonl").write_text("".join(text + "\n" for text in texts))
    return folder


def page_of(folder):
    """The text of a folder's page."""
    return pathlib.Path(write_report(folder)).read_text()


@pytest.fixture(scope="module")
def rich(tmp_path_factory):
    """A run that has recorded everything, with its page."""
    folder = written_run.write(tmp_path_factory.mktemp("runs") / "rich")
    write_report(folder)
    return folder


def test_everything_that_is_recorded_is_read(rich):
    """Numbers by name and step, null as NaN; skips, scales, starts and the end; a line that was cut
    off is counted.
    """
    run = read_run(rich)
    lines = list(written_run.lines())
    skips = [line for line in lines if line["split"] == "skip"]

    assert (run.name, run.last_step, run.unread) == ("rich", 600, 1)
    assert list(run.train["loss"].step) == list(range(20, 601, 20))
    assert math.isnan(run.train["data_wait"].value[0])
    assert set(run.train["data_wait"].value[1:]) == {0.03}
    assert list(run.validation) == ["loss", "accuracy", written_run.METRIC]
    assert [skip._asdict() | {"split": "skip"} for skip in run.skips] == skips
    assert list(run.scale.value) == [x["loss_scale"] for x in lines if x["split"] == "scale"]
    assert len(run.underflow) == 30
    assert [start.step for start in run.starts] == [0, 300]
    assert run.end == (600, 754.2, False)
    assert run.recoveries == [(307, "a loss of 1e+04, above 100", 300, 3)]
    assert run.record.step.size == 600


def test_what_cannot_be_read_is_left_out_and_counted(tmp_path):
    """Lines cut off at the end or in the middle, no objects, without a step, or without a scale."""
    bad = ['{"split": "tr', "3", "", '{"split": "train"}', '{"split": "train", "step": "1"}']
    bad += [SKIP | {"loss_scale": None}, {"split": "scale", "step": 1, "loss_scale": 0.0}]
    bad += [{"split": "end", "step": 1}]
    run = read_run(written(tmp_path, *bad[:4], TRAIN, *bad[4:]))

    assert run.unread == len(bad)
    assert (run.last_step, run.skips, run.end) == (10, [], None)
    assert list(run.train["loss"].value) == [0.5]
    assert f"killed while it writes: {len(bad)}." in page_of(tmp_path)


def test_of_two_lines_about_a_step_the_later_counts(tmp_path):
    """A run that was taken up again has written some steps anew; an end before it is no end."""
    later = TRAIN | {"loss": 0.25}
    end = {"split": "end", "step": 10, "seconds": 1.0, "stopped": True}
    start = {"split": "run", "step": 0, "time": "2026", "settings": {}, "model": []}
    recovery = {"split": "recovery", "step": 99, "what": "x", "restored": 5, "batches_left_out": 0}
    lines = [TRAIN, SKIP, end, SKIP | {"cause": "forward"}, later, recovery]

    run = read_run(written(tmp_path, *lines))
    assert list(run.train["loss"].value) == [0.25]
    assert [skip.cause for skip in run.skips] == ["forward"]
    assert run.end.stopped
    assert run.last_step == 10
    assert facts.how_it_ended(run) == "stopped on request after 1.0 s"
    again = read_run(written(tmp_path, *lines, start))
    assert again.end is None
    assert facts.how_it_ended(again) == "no end is recorded: it runs on, or was killed"


def test_a_folder_without_a_run_is_refused(tmp_path):
    """No file, and a file without a line that can be read: the error says what to give."""
    with pytest.raises(ValueError, match="run_dir") as error:
        read_run(tmp_path)
    assert str(error.value) == (
        f"`run_dir` must be a folder with a run's metrics.jsonl; got {str(tmp_path)!r}. A run "
        "writes that file at its first log line. Give the run's --model_dir."
    )
    for text, count in (("", 0), ('{"split"', 1)):
        (tmp_path / "metrics.jsonl").write_text(text)
        with pytest.raises(ValueError, match="run_dir") as error:
            read_run(tmp_path)
        assert str(error.value) == (
            "`run_dir` must hold the numbers of a run; got a metrics.jsonl in "
            f"{str(tmp_path)!r} with no line that can be read, of {count}. A run that was killed, "
            "or that is young, has none yet. Wait for its first log line, or start it again."
        )


def test_the_header(rich):
    """How far, how many, why not, how fast, and what was best, each with what else there is to say."""
    assert facts.tiles(read_run(rich)) == [
        ("step reached", "600", "ended after 12 min 34 s"),
        ("updates applied", "582", "of 600 attempted, at the last log line"),
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
        ("examples a second", "2,611", "the median of the log's lines"),
        ("waiting for data", "3.0%", "of the time, on average"),
        (
            "began",
            "2026-11-22",
            "at 02:30 UTC; taken up again once, last 2026-11-22 03:10 UTC; taken back once",
        ),
    ]


def test_which_result_is_best_is_the_runs_to_say(tmp_path):
    """`best_metric` and `best_is` of its settings; without an evaluation, the training loss."""
    settings = {"best_metric": "score", "best_is": "highest"}
    start = {"split": "run", "step": 0, "time": "2026", "settings": settings, "model": []}
    lines = [
        {"split": "validation", "step": step, "loss": loss, "score": score}
        for step, loss, score in ((1, 3.0, 0.1), (2, 2.0, 0.9), (3, 1.0, None))
    ]

    run = read_run(written(tmp_path, start, *lines))
    assert facts.best(run) == ("highest validation score", "0.9", "at step 2, loss 2")
    run = read_run(written(tmp_path, *lines))
    assert facts.best(run) == ("lowest validation loss", "1", "at step 3")
    run = read_run(written(tmp_path, TRAIN))
    assert facts.best(run) == ("lowest training loss", "0.5", "at step 10")
    run = read_run(written(tmp_path, SKIP))
    assert facts.best(run) == ("best loss", "not recorded", "")


def test_the_scale_comes_from_what_knows_it_best(tmp_path):
    """From the lines of its changes; else from recorded gradients; else from log lines and skips."""
    scale = {"split": "scale", "step": 1, "loss_scale": 8.0}
    for lines, steps, scales, known in (
        ([scale, GRADIENTS, TRAIN], [1], [8.0], True),
        ([GRADIENTS, TRAIN], [1, 2], [2.0**16, 2.0**15], True),
        ([TRAIN, SKIP], [1, 10], [2.0**16, 2.0**15], False),
        ([{"split": "train", "step": 1, "loss": 1.0}], [], [], False),
    ):
        curve, exact = facts.scale_path(read_run(written(tmp_path, *lines)))

        assert (list(curve.step), list(curve.value), exact) == (steps, scales, known)


def test_headroom_counts_the_doublings_that_are_left(tmp_path):
    """Exactly, where a gradient is 65504 by a power of two; a skipped step, whose size is unknown,
    and a gradient of zero have none.
    """
    zero = GRADIENTS | {"max_magnitude": [None, HALF_MAX / 2**17, 0.0]}

    curve = facts.headroom(read_run(written(tmp_path, GRADIENTS)).record)
    assert (list(curve.step), list(curve.value)) == ([2, 3], [2.0, 5.0])
    curve = facts.headroom(read_run(written(tmp_path, zero)).record)
    assert (list(curve.step), list(curve.value)) == ([2], [2.0])


def test_the_recommended_scale_is_that_of_scaling(tmp_path):
    """Four bits below the largest gradient of the whole run; None where no step was applied."""
    advice = facts.advise(read_run(written(tmp_path, GRADIENTS)).record)
    largest = f"{HALF_MAX / 2**17:.3g}"

    # The largest fits at 2^17, and four bits less are 2^13, where 2^-40 is lost, one of four.
    assert advice == ("2^13", largest, "25.00%", "2^15", True, 1)
    nothing = GRADIENTS | {"cause": ["backward"] * 3, "max_magnitude": [None] * 3}
    assert facts.advise(read_run(written(tmp_path, nothing)).record) is None
    assert "No step was applied" in page_of(tmp_path)


def drawn(monkeypatch, module, draw):
    """The figure that a function draws."""
    figures = []
    finish = module.finish

    def spy(figure, name, alt):
        figures.append(figure)
        return finish(figure, name, alt)

    monkeypatch.setattr(module, "finish", spy)
    draw()
    return figures[0]


def test_the_loss_scale_is_a_staircase_with_a_mark_for_each_skip(rich, monkeypatch):
    """Marks differ in colour and shape, stand where the step was, and are counted in the legend."""
    run = read_run(rich)
    [axes] = drawn(monkeypatch, pictures, lambda: pictures.draw_scale(run)).axes
    stairs = axes.get_lines()[0]
    marks = {mark.get_label(): mark for mark in axes.collections}

    assert stairs.get_drawstyle() == "steps-post"
    assert list(stairs.get_xdata()) == [*run.scale.step, 600]
    assert list(stairs.get_ydata())[:-1] == list(np.log2(run.scale.value))
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["skipped:", *marks]
    assert list(marks) == [
        "1 weights",
        "1 forward",
        "10 backward",
        "1 reduction",
        "3 unscaling",
        "2 model",
    ]
    for label, mark in marks.items():
        places = [
            (skip.step, np.log2(skip.loss_scale))
            for skip in run.skips
            if skip.cause == label.split()[1]
        ]
        assert mark.get_offsets().tolist() == [list(place) for place in places]
    assert len({tuple(mark.get_facecolor()[0]) for mark in marks.values()}) == len(marks)
    assert len({mark.get_paths()[0].vertices.tobytes() for mark in marks.values()}) == len(marks)
    assert axes.yaxis.get_major_formatter()(15, 0) == "$2^{15}$"
    assert set(pictures.CAUSES) == {cause.name.lower() for cause in Cause} - {"none"}


@pytest.mark.parametrize("scales", [[2.0**15], [2.0**15, 2.0**16], [2.0**-3, 2.0**30]])
def test_every_tick_of_the_scale_is_a_power_of_two(tmp_path, monkeypatch, scales):
    """Its own, and not the same twice, also of a scale that stands still."""
    lines = [{"split": "scale", "step": n, "loss_scale": s} for n, s in enumerate(scales, start=1)]
    run = read_run(written(tmp_path, TRAIN, *lines))
    [axes] = drawn(monkeypatch, pictures, lambda: pictures.draw_scale(run)).axes
    labels = [label.get_text() for label in axes.get_yticklabels()]

    assert len(labels) == len(set(labels)) >= 3
    assert all(tick == round(tick) for tick in axes.get_yticks())


def test_a_cause_of_a_later_version_is_marked_too(tmp_path, monkeypatch):
    """In gray, after those that are known."""
    run = read_run(written(tmp_path, SKIP, SKIP | {"step": 2, "cause": "cosmic"}))
    [axes] = drawn(monkeypatch, pictures, lambda: pictures.draw_scale(run)).axes

    assert [mark.get_label() for mark in axes.collections] == ["1 backward", "1 cosmic"]


@pytest.mark.parametrize("draw", ["draw_curves", "draw_scale", "draw_headroom", "draw_norm"])
def test_nothing_lies_upon_another_thing(rich, monkeypatch, draw):
    """Legends and titles are within the picture, apart from each other and outside the axes; the
    steps are at the same place in every picture.
    """
    run = read_run(rich)
    figure = drawn(monkeypatch, pictures, lambda: getattr(pictures, draw)(run))
    for axes in figure.axes:
        inside = axes.get_window_extent()
        apart = [axes.get_legend(), axes.title]
        boxes = [x.get_window_extent() for x in apart if x is not None]
        boxes = [box for box in boxes if box.width > 0]
        assert all(figure.bbox.contains(*box.min) for box in boxes)
        assert all(figure.bbox.contains(*box.max) for box in boxes)
        assert not any(box.y0 < inside.y1 - 1 for box in boxes)
        assert len(boxes) < 2 or not boxes[0].overlaps(boxes[1])
        assert (inside.x0, inside.x1) == pytest.approx((108, 1389.6))
        assert axes.get_xlim() == (-6, 606)


def test_training_and_validation_share_axes(rich, monkeypatch):
    """One panel for the loss and one for each metric; its name stands above it as it is written."""
    run = read_run(rich)
    figure = drawn(monkeypatch, pictures, lambda: pictures.draw_curves(run))

    assert [axes.get_title("left") for axes in figure.axes] == [
        "loss",
        "accuracy",
        written_run.METRIC,
    ]
    for axes in figure.axes:
        name = axes.get_title("left")
        lines = {line.get_label(): line for line in axes.get_lines()}
        assert list(lines["training"].get_ydata()) == list(run.train[name].value)
        assert list(lines["validation"].get_xdata()) == list(run.validation[name].step)
        assert ("regularization" in lines) == (name == "loss")


def test_a_long_run_is_drawn_as_a_band(tmp_path, monkeypatch):
    """Least, median and most headroom of some steps each: no step is left out of the band."""
    steps = 4000
    magnitudes = [HALF_MAX / 2.0 ** (20 + step % 7) for step in range(steps)]
    line = GRADIENTS | {"step": steps, "loss_scale": [2.0**15] * steps}
    line |= {"cause": ["none"] * steps, "max_magnitude": magnitudes}
    run = read_run(written(tmp_path, line))
    [axes] = drawn(monkeypatch, pictures, lambda: pictures.draw_headroom(run)).axes
    heights = axes.collections[0].get_paths()[0].vertices[:, 1]

    assert (heights.min(), heights.max()) == (5.0, 11.0)
    assert len(axes.get_lines()[0].get_xdata()) == pictures.MANY // 3


def test_the_heat_map_has_a_row_for_each_variable(rich, monkeypatch):
    """Shares where they were measured; of very many variables, those that lost most, in order."""
    run = read_run(rich)
    figure = drawn(monkeypatch, heat, lambda: heat.draw_underflow(run.underflow, 600))
    [mesh] = figure.axes[0].collections
    shares = mesh.get_array().reshape(7, 30)
    expected = [list(line.share.values())[:6] for line in run.underflow]

    assert np.array_equal(shares[:6].T, expected)
    assert shares.mask[6].all()
    labels = [label.get_text() for label in figure.axes[0].get_yticklabels()]
    assert labels[:2] == ["conv2d/kernel", "batch_normalization/gamma"]
    assert max(map(len, labels)) == heat.LETTERS

    many = {f"layer_{row}/kernel": 0.5 if row % 2 else 0.1 for row in range(2 * heat.ROWS)}
    lines = [type(run.underflow[0])(10, many)]
    figure = drawn(monkeypatch, heat, lambda: heat.draw_underflow(lines, 10))
    labels = [label.get_text() for label in figure.axes[0].get_yticklabels()]
    assert labels == [f"layer_{row}/kernel" for row in range(1, 2 * heat.ROWS, 2)]


def test_the_pictures_beside_the_page_are_those_on_it(rich):
    """Five files, byte for byte what the page holds, each with a text for who cannot see it."""
    page = (rich / "report" / "report.html").read_text()
    found = re.findall(r'<img src="data:image/png;base64,([^"]+)" alt="([^"]+)"', page)
    names = ["loss", "loss_scale", "headroom", "underflow", "gradient_norm"]

    assert len(found) == 5
    for name, (data, alt) in zip(names, found, strict=True):
        assert (rich / "report" / f"{name}.png").read_bytes() == base64.b64decode(data)
        assert len(alt) > 40
    assert not re.search(r"(?:src|href)=[\"'](?!data:|#)", page)


def test_a_section_without_data_names_the_flag_that_brings_it(tmp_path):
    """A run of one log line has a page with all sections, and says what to turn on."""
    page = page_of(written(tmp_path, TRAIN | {"skipped": 0}))

    assert re.findall(r"<h2[^>]*>(.*)</h2>", page) == HEADINGS
    assert page.count("<img ") == 3
    for sentence in (
        "With <code>--validation_interval=N</code> there is one every N steps.",
        "This needs each step's largest gradient. <code>--record_gradients</code> keeps it.",
        "<code>--record_gradients</code> writes it at every log line.",
        "This needs the gradients' magnitudes. <code>--record_gradients</code> keeps them.",
        "No step was skipped.",
        "This run wrote its scale only at log lines and skips",
        "This run has not recorded its settings.",
        "This run has not recorded its model.",
    ):
        assert sentence in page
    page = page_of(written(tmp_path, TRAIN))
    assert "Steps that were skipped: 1. Why is not recorded" in page
    page = page_of(written(tmp_path, SKIP | {"loss_scale": 1.0}))
    assert "The first is written after <code>--log_steps</code> steps." in page


def test_only_the_first_skips_are_listed(tmp_path):
    """Fifty, and how many more there are."""
    lines = [SKIP | {"step": step, "replica": None} for step in range(1, 1063)]
    page = page_of(written(tmp_path, *lines))

    assert page.count("<td>backward</td>") == 50
    assert '<td class="number">50</td>' in page
    assert '<td class="number">51</td>' not in page
    assert "And 1,012 more." in page


def test_a_real_run_has_a_page(tmp_path):
    """Every line that a trainer writes is read; its own record tells of the same steps."""
    trainer = overflowing(
        model_dir=tmp_path, steps_per_loop=4, verbose=False, record_gradients=True
    )
    trainer.train(STEEP, steps=12, global_batch=4, eval_data=STEEP, eval_interval=12)
    run = read_run(tmp_path)

    assert run.unread == 0
    assert list(run.train["loss"].value) == [3.0, -19.5, -55.5]
    assert list(run.validation["loss"].step) == [12]
    assert [skip.step for skip in run.skips] == [1, 2, 3]
    assert np.array_equal(run.record.step, read_record(tmp_path / "metrics.jsonl").step)
    assert list(facts.scale_path(run)[0].value) == [2.0**17, 2.0**16, 2.0**15, 2.0**14]
    assert run.starts[0].settings["best_metric"] == "loss"
    assert run.starts[0].model[0]["shape"] == [1, 1]
    assert (run.end.step, run.end.stopped) == (12, False)
    assert [line.step for line in run.underflow] == [4, 8, 12]
    assert set(run.train) - facts.NOT_METRICS == set()
    assert page_of(tmp_path).count("<img ") >= 4


def test_the_program(tmp_path, capsys, monkeypatch):
    """Says where the page is; errors are one sentence; a missing extra is named."""
    written(tmp_path / "run", TRAIN)
    with flagsaver.flagsaver():
        flags.FLAGS.mark_as_parsed()
        main(["report", str(tmp_path / "run")])
        page = tmp_path / "run" / "report" / "report.html"
        assert capsys.readouterr().out == f"report in {page}\n"
        assert page.exists()
        flags.FLAGS.output = str(tmp_path / "a" / "b")
        main(["report", str(tmp_path / "run")])
        assert (tmp_path / "a" / "b" / "loss.png").exists()
        flags.FLAGS.output = str(tmp_path / "run" / "metrics.jsonl")
        with pytest.raises(SystemExit) as error:
            main(["report", str(tmp_path / "run")])
        assert str(error.value) == (
            f"`output` must be a folder that can be written to; got {flags.FLAGS.output!r}: File "
            "exists. The page and its pictures go there. Give another one."
        )
        with pytest.raises(SystemExit, match="`run_dir` must be a folder"):
            main(["report", str(tmp_path)])
        with pytest.raises(app.UsageError) as usage:
            main(["report"])
        assert str(usage.value) == (
            "give one folder, the run's --model_dir: python -m trainer.report RUN"
        )
        monkeypatch.delitem(sys.modules, "trainer.report.page")
        monkeypatch.setitem(sys.modules, "jinja2", None)
        with pytest.raises(SystemExit) as error:
            main(["report", str(tmp_path / "run")])
        assert str(error.value) == (
            "jinja2 is needed to write the report; it is not installed. It comes with an extra of "
            "its own. Run pip install 'halfstep[report]'."
        )


def look(pages, width=800, dark=False):
    """What a browser shows of each page: see `tests/browser.py`."""
    wanted = {
        "width": width,
        "dark": dark,
        "pages": {str(page): str(p) for page, p in pages.items()},
    }
    program = pathlib.Path(__file__).parents[2] / "browser.py"
    result = subprocess.run(
        [sys.executable, str(program), json.dumps(wanted)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env=os.environ | {"PYTHONPATH": ""},
    )
    lines = result.stdout.splitlines()
    if "started" not in lines:
        pytest.skip(f"no browser (extra `browser`): {result.stderr.strip()[-200:]}")
    assert result.returncode == 0, result.stderr[-2000:]
    return {pathlib.Path(page): seen for page, seen in json.loads(lines[-1]).items()}


def faults(page, seen):
    """What is wrong with a page, in the eyes of its reader."""
    found = [f"asked for {url}" for url in seen["asked_for"] if url != f"file://{page}"]
    found += [f"broken image: {alt}" for alt in seen["broken"]]
    if seen["images"] != 5:
        found.append(f"{seen['images']} images")
    if seen["headings"] != [["H1", "rich"], *[["H2", heading] for heading in HEADINGS]]:
        found.append(f"headings: {seen['headings']}")
    if seen["title"] != "rich: report of a run":
        found.append(f"title: {seen['title']}")
    names = [written_run.SCRIPT, written_run.METRIC, written_run.SETTING]
    found += [f"not shown: {name}" for name in names if name not in seen["text"]]
    if seen["page_width"] > seen["window_width"]:
        found.append("wider than the window")
    return found


def damaged(page):
    """Pages with one fault each, and the fault."""
    policy = re.compile(r'<meta http-equiv="Content-Security-Policy"[^>]*>')
    assert len(policy.findall(page)) == 1
    page = policy.sub("", page)  # which would keep some of them from doing harm
    script = "&lt;script&gt;document.title=&#34;owned&#34;&lt;/script&gt;"
    assert script in page
    outside = '<img src="https://example.com/a.png" alt="a">'
    first, second = HEADINGS[:2]
    yield "none", page, None
    yield "outside", page.replace("</header>", outside), "asked for https://example.com/a.png"
    yield (
        "style",
        page.replace("</style>", "@import url(b.css);</style><link href=b.css rel=stylesheet>"),
        "asked for file://",
    )
    yield "broken", re.sub(r"base64,.{40}", "base64,", page, count=1), "broken image: Curves over"
    yield "silent", re.sub(r'alt="[^"]+"', 'alt=""', page, count=1), "broken image: no alt"
    yield "unescaped", page.replace(script, written_run.SCRIPT), "title: owned"
    yield "wide", page.replace("</header>", "<div style='width:900px'>a</div></header>"), "wider"
    yield "order", page.replace(first, "X").replace(second, first).replace("X", second), "headings"


@pytest.mark.more_in_full
def test_a_browser_shows_the_page_and_nothing_else(rich, tmp_path):
    """Nothing is fetched, every image is there and has its text, names of the run are text, and 800
    pixels are wide enough; the same checks fail for a page with one fault.
    """
    page = rich / "report" / "report.html"
    expected = {page: None}
    for name, text, fault in damaged(page.read_text()):
        path = tmp_path / f"{name}.html"
        path.write_text(text)
        expected[path] = fault
    pages = look(dict.fromkeys(expected, "") | {page: tmp_path / "light.png"})

    for path, fault in expected.items():
        found = faults(path, pages[path])
        assert bool(found) == bool(fault), f"{path.name}: {found}"
        assert not fault or any(one.startswith(fault) for one in found), f"{path.name}: {found}"
    # A PNG's width and height stand behind its first sixteen bytes.
    size = struct.unpack(">II", (tmp_path / "light.png").read_bytes()[16:24])
    assert size == (800, pages[page]["page_height"])


@pytest.mark.more_in_full
def test_the_page_follows_the_readers_choice_of_dark(rich, tmp_path):
    """Paper and ink change places; the page is whole in both, at 1600 pixels, too."""
    page = rich / "report" / "report.html"
    light = look({page: ""}, width=1600)[page]
    dark = look({page: tmp_path / "dark.png"}, width=1600, dark=True)[page]

    assert (light["background"], dark["background"]) == ("rgb(246, 247, 249)", "rgb(20, 23, 27)")
    assert faults(page, light) == faults(page, dark) == []
