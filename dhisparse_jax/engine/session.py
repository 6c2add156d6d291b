"""A request outside of its row: what it needs to go on, in plain host arrays."""

import dataclasses
import hashlib
from collections.abc import Sequence

import jax
import numpy as np
from jaxtyping import Array, Float, Int, Shaped

from dhisparse_jax.config import HierarchyConfig
from dhisparse_jax.engine.request import Request
from dhisparse_jax.errors import UserError
from dhisparse_jax.hierarchy.formats import key_shapes
from dhisparse_jax.model import Params
from pallas_kernels.index_scores.types import ScaledKeys

SAMPLED = 64
"""Numbers of a weight that its model's name depends on."""

IMPORTED = "none"
"""The draft of a session whose history no draft has read."""

HostKeys = Float[np.ndarray, "n index"] | ScaledKeys
"""Index keys as a hierarchy stores them, in host arrays."""


@dataclasses.dataclass(frozen=True)
class Session:
    """A request that stopped between two steps, with n = len(text) - 1 committed positions.

    Draws depend on seed, number and position alone, so `request` and `draw` are the whole state of
    the sampler.

    Attributes:
        model: which model made it, see `fingerprint`.
        draft: which draft.
        request: what was asked for.
        draw: number that its random draws depend on.
        produced: tokens emitted so far. The last token of `text` is not read yet.
        records: host records by position, per pool.
        keys: index keys by position, per pool.
        ring: what the drafter kept of the row: leaves whose first axis has one row.
        imported: whether it began with KV that was computed elsewhere, which is for no other
            request.
    """

    model: str
    draft: str
    request: Request
    draw: int
    produced: tuple[int, ...]
    records: tuple[Int[np.ndarray, "n _"], ...]
    keys: tuple[HostKeys, ...]
    ring: tuple[np.ndarray, ...]
    imported: bool

    @property
    def text(self) -> tuple[int, ...]:
        """Prompt and produced tokens."""
        return self.request.prompt + self.produced

    @property
    def nbytes(self) -> int:
        """Bytes of its arrays."""
        return sum(leaf.nbytes for leaf in (*self.records, *self.keys, *self.ring))

    def allowing(self, max_new_tokens: int | None) -> "Session":
        """The same with another limit of new tokens, or with its own.

        Raises:
            UserError: it has produced that many already.
        """
        limit = self.request.max_new_tokens if max_new_tokens is None else max_new_tokens
        if limit <= len(self.produced):
            raise UserError(
                f"{self.request.name}: the session has produced {len(self.produced)} tokens of "
                f"{limit}; raise max-new-tokens"
            )
        return dataclasses.replace(
            self, request=dataclasses.replace(self.request, max_new_tokens=limit)
        )


def fingerprint(sizes: object, params: Params) -> str:
    """A name for a model: its sizes, and a sample of every weight.

    Args:
        sizes: whatever says what it is, with a `repr` that is the same in every process.
        params: the weights, whose names, shapes, dtypes and some numbers count.
    """
    digest = hashlib.sha256(repr(sizes).encode())
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        digest.update(f"{jax.tree_util.keystr(path)} {leaf.shape} {leaf.dtype}".encode())
        if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            continue
        digest.update(_sample(leaf).tobytes())
    return digest.hexdigest()[:32]


def _sample(leaf: Array | np.ndarray) -> Shaped[np.ndarray, " n"]:
    """Some numbers of a weight, from all of it.

    Nothing is flattened first: that would copy the weight, and a device that serves is full.
    """
    chosen = np.arange(0, leaf.size, max(1, leaf.size // SAMPLED))[:SAMPLED]
    at = np.unravel_index(chosen, leaf.shape) if leaf.shape else (None,)
    return np.asarray(leaf[at])


def imported(
    model: str,
    request: Request,
    records: Sequence[Int[np.ndarray, "n _"]],
    keys: Sequence[HostKeys],
) -> Session:
    """A session of KV computed elsewhere: that of all tokens of the prompt but the last.

    No other request ever reads it, whatever becomes of this one.

    Args:
        model: `Machine.model_id` of the model that the records are of.
        request: its prompt has n + 1 tokens; the last one is read by the first step.
        records: packed rows by position, per pool, int32: layers side by side, padded to whole
            records.
        keys: index keys by position, per pool, as they are stored.
    """
    return Session(
        model=model,
        draft=IMPORTED,
        request=request,
        draw=0,
        produced=(),
        records=tuple(records),
        keys=tuple(keys),
        ring=(),
        imported=True,
    )


def check_session(session: Session, model: str, cfg: HierarchyConfig) -> None:
    """Whether a session can go on in an engine.

    Raises:
        UserError: it is of another model, or its arrays have other shapes or dtypes, or it is too
            long, or no session can.
    """
    cfg.geometry.check_movable("a session")
    name, length = session.request.name, len(session.text) - 1
    if session.model != model:
        raise UserError(
            f"{name}: the session is of model {session.model}, this is {model}; load its model, "
            "with the formats of its history"
        )
    if length < 1:
        raise UserError(f"{name}: the session has {length} positions; submit its request instead")
    if length + 1 >= cfg.capacity:
        raise UserError(
            f"{name}: the session has {length} positions and the token after them, the context is "
            f"{cfg.capacity}; it must be at least {length + 2}"
        )
    counts = len(session.records), len(session.keys)
    if counts != (cfg.pools, cfg.pools):
        raise UserError(
            f"{name}: there are records and keys of {counts[0]} and {counts[1]} pools; the model "
            f"has {cfg.pools}"
        )
    for pool in range(cfg.pools):
        records = jax.ShapeDtypeStruct((length, *cfg.record_shape(pool)), np.int32)
        wanted = _named(records, key_shapes(cfg.geometry, length))
        found = _named(session.records[pool], session.keys[pool])
        if found != wanted:
            raise UserError(
                f"{name}: records and keys of pool {pool} are {found}; needed are {wanted}"
            )


def _named(*arrays: object) -> str:
    """Dtypes and shapes, as a person reads them: `int32[9, 32] float32[9, 8]`."""
    return " ".join(f"{leaf.dtype}{list(leaf.shape)}" for leaf in jax.tree.leaves(arrays))
