"""What a receiver gets of a `OneOf` message."""

from pflmpi import tree
from pflmpi.tree import Tree


def one_of(published: Tree, receiver: int) -> Tree:
    """The tree that was chosen for the receiver at some place."""
    return tree.row(tree.part(published, "choices"), int(tree.leaf(published, "chosen")[receiver]))
