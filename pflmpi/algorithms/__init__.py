"""The algorithms, one file each; a line here is all that registers one."""

from pflmpi.algorithms.base import Algorithm
from pflmpi.algorithms.fedamp import FedAMP
from pflmpi.algorithms.fedavg import FedAvg
from pflmpi.algorithms.fedgmh import FedGMH
from pflmpi.algorithms.fedper import FedPer
from pflmpi.algorithms.fedproto import FedProto
from pflmpi.algorithms.fedprox import FedProx
from pflmpi.algorithms.local_only import Local
from pflmpi.registry import Registry

ALGORITHMS: Registry[type[Algorithm]] = Registry(
    "algorithm",
    {
        "local": Local,
        "fedavg": FedAvg,
        "fedprox": FedProx,
        "fedper": FedPer,
        "fedproto": FedProto,
        "fedamp": FedAMP,
        "fedgmh": FedGMH,
    },
)
