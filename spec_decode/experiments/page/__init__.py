"""report.html: the page of a report, and its plots."""
