"""The program: `python -m trainer.report RUN`; with `--output=DIR` the page goes there."""

import sys

from absl import app, flags

from trainer.report.writing import write_report

OUTPUT = flags.DEFINE_string("output", None, "Where the page goes; by default RUN/report.")


def main(arguments: list[str]) -> None:
    """Reads the command line, writes the page, and says where it is."""
    if len(arguments) != 2:
        raise app.UsageError("give one folder, the run's --model_dir: python -m trainer.report RUN")
    try:
        print(f"report in {write_report(arguments[1], OUTPUT.value)}")
    except (ValueError, OSError, ModuleNotFoundError) as error:
        sys.exit(str(error))


if __name__ == "__main__":
    app.run(main)
