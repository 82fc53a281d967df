"""A run's page: what `metrics.jsonl` holds, as a person wants to see it.

    python -m trainer.report RUN

writes RUN/report/report.html, one file that fetches nothing, and its pictures beside it.
"""

from trainer.report.writing import write_report

__all__ = ["write_report"]
