"""What a device was asked to do."""

from dataclasses import dataclass


@dataclass
class Counts:
    """What a device was asked to do.

    Attributes:
        launches: operations that compute or move something on the device.
        uploads: copies from the host.
        downloads: copies to the host.
        syncs: times that the host had to wait for a value, other than for a download.
    """

    launches: int = 0
    uploads: int = 0
    downloads: int = 0
    syncs: int = 0

    def __sub__(self, other: "Counts") -> "Counts":
        return Counts(*(count - other_count for count, other_count in zip(self.row(), other.row(), strict=True)))

    def __add__(self, other: "Counts") -> "Counts":
        return Counts(*(count + other_count for count, other_count in zip(self.row(), other.row(), strict=True)))

    def row(self) -> tuple[int, int, int, int]:
        """The four numbers in order."""
        return self.launches, self.uploads, self.downloads, self.syncs
