"""The command `python -m trainer.report RUN`, which writes the report of a run.

With several runs it writes a page that compares them. `--output=DIR` writes to another folder.
"""

import pathlib
import sys

from absl import app, flags

from trainer.report.page import compare_runs, write_report

OUTPUT = flags.DEFINE_string(
    "output", None, "Folder to write to; default: RUN/report, or with several runs their parent."
)


def main(arguments: list[str]) -> None:
    """Parses the command line, writes the report or the comparison, and prints its path."""
    runs = arguments[1:]
    if not runs:
        raise app.UsageError("pass the --model_dir of one or more runs: trainer.report RUN ...")
    try:
        if len(runs) == 1:
            print(f"report in {write_report(runs[0], OUTPUT.value)}")
        else:
            output = OUTPUT.value or pathlib.Path(runs[0]).resolve().parent
            print(f"comparison in {compare_runs(runs, output)}")
    except (ValueError, OSError) as error:
        sys.exit(str(error))


if __name__ == "__main__":
    app.run(main)
