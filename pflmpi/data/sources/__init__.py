"""Where data comes from, one file for each kind; a line here is all that registers a source."""

from pflmpi.data.sources.base import OwnSource, Source
from pflmpi.data.sources.cifar import CIFAR10, CIFAR100
from pflmpi.data.sources.digits import Digits
from pflmpi.data.sources.femnist import Femnist
from pflmpi.data.sources.idx import EMNIST, FASHION_MNIST, MNIST
from pflmpi.registry import Registry, accept_subclass

SOURCES: Registry[Source | type[OwnSource]] = Registry(
    "dataset",
    {
        "digits": Digits(),
        "mnist": MNIST,
        "fashion_mnist": FASHION_MNIST,
        "cifar10": CIFAR10,
        "cifar100": CIFAR100,
        "emnist": EMNIST,
        "femnist": Femnist(),
    },
    group="pflmpi.data",
    accept=accept_subclass(OwnSource),
    section="data",
)
