"""The algorithms, one file each; a line here, and a word in the list of completion, register one of the package."""

from pflmpi.algorithms.apfl import APFL
from pflmpi.algorithms.base import Algorithm
from pflmpi.algorithms.ditto import Ditto
from pflmpi.algorithms.fedamp import FedAMP
from pflmpi.algorithms.fedavg import FedAvg
from pflmpi.algorithms.fedcp import FedCP
from pflmpi.algorithms.fedfcd import FedFCD
from pflmpi.algorithms.fedfomo import FedFomo
from pflmpi.algorithms.fedgh import FedGH
from pflmpi.algorithms.fedgmh import FedGMH
from pflmpi.algorithms.fedper import FedPer
from pflmpi.algorithms.fedproto import FedProto
from pflmpi.algorithms.fedprox import FedProx
from pflmpi.algorithms.fedrep import FedRep
from pflmpi.algorithms.fedrod import FedRoD
from pflmpi.algorithms.fesem import FeSEM
from pflmpi.algorithms.gpfl import GPFL
from pflmpi.algorithms.l2gd import L2GD
from pflmpi.algorithms.lgfedavg import LGFedAvg
from pflmpi.algorithms.local_only import Local
from pflmpi.algorithms.perfedavg import PerFedAvg
from pflmpi.algorithms.pfedafe import PFedAFE
from pflmpi.algorithms.pfedcfr import PFedCFR
from pflmpi.algorithms.pfedme import PFedMe
from pflmpi.algorithms.pfedpm import PFedPM
from pflmpi.registry import Registry, subclass

ALGORITHMS: Registry[type[Algorithm]] = Registry(
    "algorithm",
    {
        "apfl": APFL,
        "ditto": Ditto,
        "fedamp": FedAMP,
        "fedavg": FedAvg,
        "fedcp": FedCP,
        "fedfcd": FedFCD,
        "fedfomo": FedFomo,
        "fedgh": FedGH,
        "fedgmh": FedGMH,
        "fedper": FedPer,
        "fedproto": FedProto,
        "fedprox": FedProx,
        "fedrep": FedRep,
        "fedrod": FedRoD,
        "fesem": FeSEM,
        "gpfl": GPFL,
        "l2gd": L2GD,
        "lgfedavg": LGFedAvg,
        "local": Local,
        "perfedavg": PerFedAvg,
        "pfedafe": PFedAFE,
        "pfedcfr": PFedCFR,
        "pfedme": PFedMe,
        "pfedpm": PFedPM,
    },
    group="pflmpi.algorithms",
    accept=subclass(Algorithm, "summary", "paper", of_client=("init_client", "init_received")),
)
