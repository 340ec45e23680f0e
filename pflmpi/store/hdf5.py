"""h5py, which has no type annotations; the names below stand in for its types."""

from typing import Any

import h5py as _h5py

h5py: Any = _h5py

File = Any
Group = Any
Dataset = Any
