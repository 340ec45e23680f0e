"""The datasets that torchvision knows: where their files lie, and one line about each."""

from pflmpi.data.sources.cifar import CifarSource
from pflmpi.data.sources.idx import IdxSource

MNIST = IdxSource(
    "mnist", "MNIST", "70000 handwritten digits, 1x28x28, 10 classes; with writers where MNIST/writers.npz is"
)
FASHION_MNIST = IdxSource("fashion_mnist", "FashionMNIST", "70000 pieces of clothing, 1x28x28, 10 classes")
CIFAR10 = CifarSource(
    name="cifar10",
    reader="CIFAR10",
    folder="cifar-10-batches-py",
    parts=(*(f"data_batch_{i}" for i in range(1, 6)), "test_batch", "batches.meta"),
    num_classes=10,
    summary="60000 small photographs, 3x32x32, 10 classes",
)
CIFAR100 = CifarSource(
    name="cifar100",
    reader="CIFAR100",
    folder="cifar-100-python",
    parts=("train", "test", "meta"),
    num_classes=100,
    summary="60000 small photographs, 3x32x32, 100 (fine) classes",
)
