"""Writes the report of a run: reads the run, draws the pictures, and writes the page."""

import pathlib

from trainer.base.argument_checks import check_path
from trainer.base.atomic_files import replace_file
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
        ValueError: if `run_dir` has no readable `metrics.jsonl`, if `output` cannot be created or
            written to, or if `output` is None and `run_dir/report` is a link.
        ModuleNotFoundError: if a package of the extra `report` is not installed.

    Example:
        >>> import json, tempfile
        >>> run = pathlib.Path(tempfile.mkdtemp())
        >>> line = {"split": "train", "step": 100, "loss": 0.5, "applied": 92, "skipped": 8}
        >>> size = (run / "metrics.jsonl").write_text(json.dumps(line) + "\n")
        >>> pathlib.Path(write_report(run)).name, (run / "report" / "loss.png").exists()
        ('report.html', True)
    """
    check_path("run_dir", run_dir)
    if output is not None:
        check_path("output", output)
    try:
        run = read_run(run_dir)
    except OSError as error:
        raise ValueError(
            f"`run_dir` must be a folder that you may read; got {str(run_dir)!r}: "
            f"{error.strerror}. The report is made from its metrics.jsonl. Ask its owner for the "
            "permission to read it, or pass another folder."
        ) from error
    try:
        from trainer.report.page import render
        from trainer.report.pictures import draw_all
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"Writing a report needs {error.name}, which is not installed. "
            "Run pip install 'halfstep[report]'."
        ) from error
    folder = pathlib.Path(run_dir) / "report" if output is None else pathlib.Path(output)
    if output is None and folder.is_symlink():  # whoever wrote the run may have chosen its target
        raise ValueError(
            f"`output` must be passed for this run; got None, and {str(folder)!r} is a link. It "
            "could lead to files of yours, which the report would replace. Remove the link, or "
            "pass the folder to write to."
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        pictures = draw_all(run)
        for picture in pictures.values():
            replace_file(folder / picture.file, picture.png)
        replace_file(folder / "report.html", render(run, pictures).encode())
    except OSError as error:
        raise ValueError(
            f"`output` must be a folder that can be created or written to; got {str(folder)!r}: "
            f"{error.strerror}. The page and its pictures are written there. Pass another folder."
        ) from error
    return str(folder / "report.html")
