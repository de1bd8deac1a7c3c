"""Kernels for GPUs, in Pallas for Triton, each beside its reference in plain JAX."""
