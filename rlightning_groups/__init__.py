"""Parallel process groups for PyTorch Lightning."""
