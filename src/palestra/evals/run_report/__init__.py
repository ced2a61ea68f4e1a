"""report.json and report.html of a run, with their charts."""
