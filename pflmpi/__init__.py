"""Personalised federated learning on clusters. `import pflmpi` alone imports no torch."""

__version__ = "0.1.0"
