"""Side-by-side benchmarks: `python -m bench.NAME` prints a table and, last, one JSON object."""
