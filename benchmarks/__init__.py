"""How fast it is, beside what else does the same job: ``python -m benchmarks [NAME ...] [--store STORE] [--json]``."""
