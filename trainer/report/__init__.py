"""The report of a run: one HTML page with everything that `metrics.jsonl` records.

    python -m trainer.report RUN

writes RUN/report/report.html, a self-contained file, and its pictures as separate PNG files.
"""

from trainer.report.page import write_report

__all__ = ["write_report"]
