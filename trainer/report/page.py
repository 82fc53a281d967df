"""Writes the report of a run: its pictures, and an HTML page with facts and pictures."""

import base64
import dataclasses
import pathlib
import re
from collections.abc import Mapping

import jinja2
import markupsafe

from trainer.base.atomic_files import write_atomically
from trainer.log.summary import format_bytes, power_of_two
from trainer.report import facts
from trainer.report.canvas import MAX_ROWS, Picture
from trainer.report.float8_pictures import counted, layers_left_out
from trainer.report.pictures import curves_left_out, draw_all
from trainer.report.reading import Run, read_run

MAX_SKIPS = 50  # rows of the table of skipped steps


def write_report(run_dir: str | pathlib.Path, output: str | pathlib.Path | None = None) -> str:
    r"""Writes the report of a run: a page, and its pictures as separate files.

    Args:
        run_dir: the run's `model_dir`.
        output: the folder to write to, which is created if needed; None means `run_dir/report`.

    Returns:
        The path of the page.

    Raises:
        ValueError: if `run_dir` has no readable `metrics.jsonl`, or if `output` is None and
            `run_dir/report` is a link.

    Example:
        >>> import json, tempfile
        >>> run = pathlib.Path(tempfile.mkdtemp())
        >>> line = {"split": "train", "step": 100, "loss": 0.5, "applied": 92, "skipped": 8}
        >>> size = (run / "metrics.jsonl").write_text(json.dumps(line) + "\n")
        >>> pathlib.Path(write_report(run)).name, (run / "report" / "loss.png").exists()
        ('report.html', True)
    """
    run = read_run(run_dir)
    folder = pathlib.Path(run_dir) / "report" if output is None else pathlib.Path(output)
    if output is None and folder.is_symlink():  # whoever wrote the run may have chosen its target
        raise ValueError(f"`output` must be given where {str(folder)!r} is a link")
    pictures = draw_all(run)
    for picture in pictures.values():
        write_atomically(folder / picture.file, picture.png)
    write_atomically(folder / "report.html", render(run, pictures))
    return str(folder / "report.html")


def render(run: Run, pictures: Mapping[str, Picture]) -> str:
    """Returns the page of a run as HTML. Text from the run's log is escaped.

    Args:
        run: the run.
        pictures: the pictures of the run, keyed by name.
    """
    return template("report.html.jinja").render(
        run=dataclasses.replace(run, skips=run.skips[:MAX_SKIPS]),
        curves_left_out=curves_left_out(run),
        skipped=facts.last(run.train.get("skipped")),
        none_applied=facts.last(run.train.get("applied")) == 0,
        more_skips=len(run.skips) - MAX_SKIPS,
        pictures=pictures,
        tiles=facts.tiles(run),
        not_recorded=facts.NOT_RECORDED,
        rows_left_out=len({name for line in run.underflow for name in line.share}) - MAX_ROWS,
        float8_counted=counted(run),
        layers_left_out=layers_left_out(run),
        headroom_bits=facts.HEADROOM_BITS,
        advice=facts.advise(run.record) if run.record else None,
        settings=facts.settings_rows(run),
        model=run.starts[-1].model if run.starts else [],
    )


def template(name: str) -> jinja2.Template:
    """Returns a template of this package. It escapes what it is given."""
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("trainer", "report"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["data_url"] = data_url
    environment.filters["power_of_two"] = power_of_two
    environment.filters["format_bytes"] = format_bytes
    environment.filters["superscript"] = superscript
    return environment.get_template(name)


def superscript(text: str) -> markupsafe.Markup:
    """Converts text to HTML, with the exponents of powers of two as superscripts.

    Example:
        >>> superscript("<b> 2^16")
        Markup('&lt;b&gt; 2<sup>16</sup>')
    """
    return markupsafe.Markup(  # noqa: S704 - the text is escaped, and only digits are inserted
        re.sub(r"\b2\^(-?\d+)", r"2<sup>\1</sup>", str(markupsafe.escape(text)))
    )


def data_url(picture: Picture) -> str:
    """Returns a picture as a data URL."""
    return f"data:image/png;base64,{base64.b64encode(picture.png).decode('ascii')}"
