"""Scoring: evaluation suites, measures and judges, and what their results say about a training.

`suite`, `measures` and `report` score and compare; `findings` explains why a run learns little.
`run_report/` writes report.json and report.html.
"""
