"""A sweep: one experiment, run for every combination of some keys' values, one run after another.

grid.py     what `--sweep KEY=VALUES` means: the runs, all validated before the first starts
walk.py     runs them in order: what is done is skipped, what failed is recorded, a signal stops the sweep
children.py a run as a process of its own
results.py  the table, best first, and the record in RUN_DIR/NAME.sweep.json
"""
