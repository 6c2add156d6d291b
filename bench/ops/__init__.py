"""What `bench.kernels` runs: a module per operation.

Each has `CASES`, named production sizes, and `shared`, which makes a benchmark of the inputs in
`pallas_kernels/<operation>/cases.py`.
"""
