"""Testing personal models, and the figures of it."""
