"""Lowering GPU kernels on a machine without a GPU: what the Triton lowering refuses, shows here."""

import warnings

import jax
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh

H200 = AbstractDevice("NVIDIA H200", 132, "gpu")


def lowered_kernels(function, *arguments):
    """How many Triton kernels `function` becomes for CUDA; arguments may be shapes."""
    mesh = AbstractMesh((), (), abstract_device=H200)
    with use_abstract_mesh(mesh), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The Pallas Triton backend is deprecated")
        lowered = jax.jit(function).trace(*arguments).lower(lowering_platforms=("cuda",))
    return lowered.as_text().count("xla.gpu.triton")
