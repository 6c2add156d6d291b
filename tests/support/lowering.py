"""Lowering GPU kernels on a machine without a GPU: what the Triton lowering refuses, shows here."""

import warnings

import jax
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh

H200 = AbstractDevice("NVIDIA H200", 132, "gpu")


def lowered(function, *arguments):
    """`function` lowered for CUDA, as text; arguments may be shapes."""
    mesh = AbstractMesh((), (), abstract_device=H200)
    with use_abstract_mesh(mesh), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The Pallas Triton backend is deprecated")
        return jax.jit(function).trace(*arguments).lower(lowering_platforms=("cuda",)).as_text()


def lowered_kernels(function, *arguments):
    """How many Triton kernels `function` becomes for CUDA; arguments may be shapes."""
    return lowered(function, *arguments).count("xla.gpu.triton")
