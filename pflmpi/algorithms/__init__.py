"""The algorithms, one file each; a new one is registered here and in the list of shell completion."""

from pflmpi.algorithms.apfl import APFL
from pflmpi.algorithms.base import Algorithm
from pflmpi.algorithms.ditto import Ditto
from pflmpi.algorithms.fedala import FedALA
from pflmpi.algorithms.fedamp import FedAMP
from pflmpi.algorithms.fedavg import FedAvg
from pflmpi.algorithms.fedbabu import FedBABU
from pflmpi.algorithms.fedbn import FedBN
from pflmpi.algorithms.fedcp import FedCP
from pflmpi.algorithms.fedfcd import FedFCD
from pflmpi.algorithms.fedfomo import FedFomo
from pflmpi.algorithms.fedgh import FedGH
from pflmpi.algorithms.fedgmh import FedGMH
from pflmpi.algorithms.fednova import FedNova
from pflmpi.algorithms.fedopt import FedAdagrad, FedAdam, FedAvgM, FedYogi
from pflmpi.algorithms.fedpac import FedPAC
from pflmpi.algorithms.fedper import FedPer
from pflmpi.algorithms.fedproto import FedProto
from pflmpi.algorithms.fedprox import FedProx
from pflmpi.algorithms.fedrep import FedRep
from pflmpi.algorithms.fedrod import FedRoD
from pflmpi.algorithms.fesem import FeSEM
from pflmpi.algorithms.fine_tuning import FedAvgFT
from pflmpi.algorithms.gpfl import GPFL
from pflmpi.algorithms.l2gd import L2GD
from pflmpi.algorithms.lgfedavg import LGFedAvg
from pflmpi.algorithms.local_only import Local
from pflmpi.algorithms.moon import Moon
from pflmpi.algorithms.perfedavg import PerFedAvg
from pflmpi.algorithms.pfedafe import PFedAFE
from pflmpi.algorithms.pfedcfr import PFedCFR
from pflmpi.algorithms.pfedme import PFedMe
from pflmpi.algorithms.pfedpm import PFedPM
from pflmpi.algorithms.scaffold import Scaffold
from pflmpi.registry import Registry, accept_subclass

ALGORITHMS: Registry[type[Algorithm]] = Registry(
    "algorithm",
    {
        "apfl": APFL,
        "ditto": Ditto,
        "fedadagrad": FedAdagrad,
        "fedadam": FedAdam,
        "fedala": FedALA,
        "fedamp": FedAMP,
        "fedavg": FedAvg,
        "fedavg_ft": FedAvgFT,
        "fedavgm": FedAvgM,
        "fedbabu": FedBABU,
        "fedbn": FedBN,
        "fedcp": FedCP,
        "fedfcd": FedFCD,
        "fedfomo": FedFomo,
        "fedgh": FedGH,
        "fedgmh": FedGMH,
        "fednova": FedNova,
        "fedpac": FedPAC,
        "fedper": FedPer,
        "fedproto": FedProto,
        "fedprox": FedProx,
        "fedrep": FedRep,
        "fedrod": FedRoD,
        "fedyogi": FedYogi,
        "fesem": FeSEM,
        "gpfl": GPFL,
        "l2gd": L2GD,
        "lgfedavg": LGFedAvg,
        "local": Local,
        "moon": Moon,
        "perfedavg": PerFedAvg,
        "pfedafe": PFedAFE,
        "pfedcfr": PFedCFR,
        "pfedme": PFedMe,
        "pfedpm": PFedPM,
        "scaffold": Scaffold,
    },
    group="pflmpi.algorithms",
    accept=accept_subclass(Algorithm, "summary", "paper", of_client=("init_client", "init_received")),
)
