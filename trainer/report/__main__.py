"""The command `python -m trainer.report RUN`, which writes the report of a run.

`--output=DIR` writes it to another folder.
"""

import sys

from absl import app, flags

from trainer.report.reading import clean
from trainer.report.writing import write_report

OUTPUT = flags.DEFINE_string("output", None, "Folder to write the report to; default: RUN/report.")


def main(arguments: list[str]) -> None:
    """Parses the command line, writes the report, and prints its path."""
    if len(arguments) != 2:
        raise app.UsageError(
            "pass exactly one folder, the run's --model_dir: python -m trainer.report RUN"
        )
    try:
        print(f"report in {clean(write_report(arguments[1], OUTPUT.value))}")
    except (TypeError, ValueError, OSError, ModuleNotFoundError) as error:
        sys.exit(str(error))


if __name__ == "__main__":
    app.run(main)
