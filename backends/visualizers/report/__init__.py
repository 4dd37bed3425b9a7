"""One self-contained HTML page about plans and runs: `rlflow.reports` makes it, `page.render_report` draws it."""
