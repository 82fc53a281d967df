"""Writes the report of a run: reads the run, draws the pictures, and writes the page."""

import pathlib

from trainer.base.argument_checks import check_path
from trainer.report.reading import read_run


def write_report(run_dir: str | pathlib.Path, output: str | pathlib.Path | None = None) -> str:
    r"""Writes the report of a run: a page, and its pictures as separate files.

    Args:
        run_dir: the run's `model_dir`.
        output: the folder to write to, which is created if needed; None means `run_dir/report`.

    Returns:
        The path of the page.

    Raises:
        TypeError: if an argument is not a path.
        ValueError: if `run_dir` has no readable `metrics.jsonl`, or if `output` cannot be created.
        ModuleNotFoundError: if a package of the extra `report` is not installed.

    Example:
        >>> import json, tempfile
        >>> run = pathlib.Path(tempfile.mkdtemp())
        >>> line = {"split": "train", "step": 100, "loss": 0.5, "applied": 92, "skipped": 8}
        >>> size = (run / "metrics.jsonl").write_text(json.dumps(line) + "\n")
        >>> pathlib.Path(write_report(run)).name, (run / "report" / "loss.png").exists()
        ('report.html', True)
    """
    check_path("run_dir", run_dir, "runs/digits")
    check_path("output", output, "report", optional=True)
    run = read_run(run_dir)
    try:
        from trainer.report.page import render
        from trainer.report.pictures import draw_all
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"Writing a report needs {error.name}, which is not installed. "
            "Run pip install 'halfstep[report]'."
        ) from error
    folder = pathlib.Path(run_dir) / "report" if output is None else pathlib.Path(output)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(
            f"`output` must be a folder that can be created or written to; got {str(folder)!r}: "
            f"{error.strerror}. The page and its pictures are written there. Pass another folder."
        ) from error
    pictures = draw_all(run)
    for picture in pictures.values():
        (folder / picture.file).write_bytes(picture.png)
    page = folder / "report.html"
    page.write_text(render(run, pictures), encoding="utf-8")
    return str(page)
