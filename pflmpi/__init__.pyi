from pflmpi.analysis.run import open_run as open_run

__version__: str
