"""The page itself: facts and pictures set into `report.html.jinja`, everything in one file."""

import base64
import dataclasses
import re

import jinja2
import markupsafe

from trainer.log.summary import power_of_two
from trainer.report import facts
from trainer.report.canvas import Picture
from trainer.report.heat import ROWS
from trainer.report.reading import Run

SKIPS = 50  # rows of their table


def render(run: Run, pictures: dict[str, Picture]) -> str:
    """Returns the page of a run. Whatever the run wrote stands in it as text.

    Args:
        run: the run.
        pictures: of it, by name.
    """
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("trainer", "report"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["data_url"] = data_url
    environment.filters["power_of_two"] = power_of_two
    environment.filters["raised"] = raised
    parameters, bytes_ = facts.model_totals(run)
    return environment.get_template("report.html.jinja").render(
        run=dataclasses.replace(run, skips=run.skips[:SKIPS]),
        skipped=facts.last(run.train.get("skipped")),
        more_skips=len(run.skips) - SKIPS,
        pictures=pictures,
        tiles=facts.tiles(run),
        rows_left_out=len({name for line in run.underflow for name in line.share}) - ROWS,
        exact=facts.scale_path(run)[1],
        headroom_bits=facts.HEADROOM_BITS,
        advice=facts.advise(run.record) if run.record else None,
        settings=facts.settings_rows(run),
        model=facts.model_rows(run),
        parameters=parameters,
        bytes=bytes_,
    )


def raised(text: str) -> markupsafe.Markup:
    """Returns a text with its powers of two as people write them: 2^16 with the 16 above.

    Example:
        >>> raised("<b> 2^16")
        Markup('&lt;b&gt; 2<sup>16</sup>')
    """
    return markupsafe.Markup(  # noqa: S704 - of digits only, in a text that was escaped
        re.sub(r"\b2\^(-?\d+)", r"2<sup>\1</sup>", str(markupsafe.escape(text)))
    )


def data_url(picture: Picture) -> str:
    """Returns a picture as an address that holds it."""
    return f"data:image/png;base64,{base64.b64encode(picture.png).decode('ascii')}"
