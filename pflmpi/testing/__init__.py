"""Tests for an algorithm of your own: the properties of every algorithm, as a class that pytest runs.

from pflmpi.testing import AlgorithmTests

class TestMine(AlgorithmTests):
    algorithm = "./mine.py:FedMine"
"""

from pflmpi.testing.conformance import AlgorithmTests

__all__ = ["AlgorithmTests"]
