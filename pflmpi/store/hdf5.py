"""The door to h5py, which has no type annotations; what they would be is said by the names below."""

from typing import Any

import h5py as _h5py

h5py: Any = _h5py

File = Any
Group = Any
Dataset = Any
