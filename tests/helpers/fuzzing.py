"""How the tests that fuzz choose their examples: the same few in the suite, new ones under `benchmarks/fuzz.py`."""

import os

from hypothesis import HealthCheck, settings

TIMES = int(os.environ.get("PFLMPI_FUZZ_TIMES", "0"))  # as many examples as in the suite, and other ones for each seed


def fuzz(examples):
    """Settings of a test with that many examples."""
    return settings(
        derandomize=not TIMES,
        max_examples=examples * max(TIMES, 1),
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
