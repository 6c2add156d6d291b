"""Package pallas_kernels."""
