"""Reports made from the result lines of runs: a page, the pages of a suite, or a table for the terminal."""

from tape_pe.report.page import write_report
from tape_pe.report.scores import overview_text
from tape_pe.report.site import write_site
from tape_pe.report.suite_results import read_suite
from tape_pe.report.tables import summary_table

__all__ = ["overview_text", "read_suite", "summary_table", "write_report", "write_site"]
