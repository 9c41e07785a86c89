"""Reports: one self-contained HTML page, or a table for the terminal, made from the result lines of runs."""

from tape_pe.report.page import write_report
from tape_pe.report.tables import summary_table

__all__ = ["summary_table", "write_report"]
