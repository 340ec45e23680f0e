from pflmpi.analysis.run import open_run as open_run
from pflmpi.analysis.runs import open_runs as open_runs
from pflmpi.config.keywords import Config as Config
from pflmpi.python.run import run as run
from pflmpi.python.submit import submit as submit

__version__: str
