"""Benchmarks: each module is a command (`python -m bench.NAME`) whose last line is one JSON object.

record.py      what every result says about the machine
load_sweep.py  the policies against the load, on the bundled model
plots.py       pictures from committed results
results/       committed results
"""
