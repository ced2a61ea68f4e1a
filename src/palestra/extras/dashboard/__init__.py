"""Runs in a browser: a JSON API over run folders, and the page in `static/`.

It only reads run folders and the index; whatever starts or stops a run goes through `runs.manager`.
`rollout_index` keeps an SQLite index of each run's rollouts.
"""
