"""Benchmarks: Deadsure beside plain Celery on the same servers, in one run. `python -m bench --help`."""
