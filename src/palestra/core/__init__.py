"""What every other package uses: data types, settings, errors, the run folder, HTTP client, child processes.

`types` has the data types from `Turn` to `Sample`; `config` has every setting; `run_folder` names a run's files.
Imports no other package of Palestra and no torch.
"""
