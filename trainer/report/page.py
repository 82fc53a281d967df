"""The HTML page: fills `report.html.jinja` with facts and pictures, all in one file."""

import base64
import dataclasses
import re
from collections.abc import Mapping

import jinja2
import markupsafe

from trainer.log.summary import power_of_two
from trainer.report import facts
from trainer.report.canvas import Picture
from trainer.report.float8_pictures import counted, layers_left_out
from trainer.report.heat import MAX_ROWS
from trainer.report.pictures import curves_left_out
from trainer.report.reading import Run

MAX_SKIPS = 50  # rows of the table of skipped steps
MAX_RECOVERIES = 20  # sentences about rollbacks


def render(run: Run, pictures: Mapping[str, Picture]) -> str:
    """Returns the page of a run as HTML. Text from the run's log is escaped.

    Args:
        run: the run.
        pictures: the pictures of the run, keyed by name.
    """
    parameters, bytes_ = facts.model_totals(run)
    return template("report.html.jinja").render(
        run=dataclasses.replace(
            run, skips=run.skips[:MAX_SKIPS], recoveries=run.recoveries[:MAX_RECOVERIES]
        ),
        more_recoveries=len(run.recoveries) - MAX_RECOVERIES,
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
        exact=facts.scale_path(run)[1],
        headroom_bits=facts.HEADROOM_BITS,
        advice=facts.advise(run.record) if run.record else None,
        settings=facts.settings_rows(run),
        model=facts.model_rows(run),
        max_rows=facts.MAX_ROWS,
        parameters=parameters,
        bytes=bytes_,
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
