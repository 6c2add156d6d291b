"""One benchmark case, from its sizes to something that can be timed."""

import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, Generic, NamedTuple, Protocol, Self

from bench.roofline import Traffic
from dhisparse_jax.engine.timing import Operands, Result, State, Step
from pallas_kernels.common.backends import Backend


class WrongResultError(Exception):
    """A timed operation did not do what it should; its time means nothing."""


class Memory(NamedTuple):
    """Bytes that a case allocates."""

    host: int
    device: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Work(Generic[State, Operands, Result]):
    """A case with its operands allocated.

    Attributes:
        step: one call of the operation, see `timing.Step`.
        state: pytree that is handed from call to call.
        anew: every chain starts from this state, not from where the last one ended.
        operands: pytree that the calls read.
        calls: calls of a chain, each on data of its own.
        traffic: what one call has to do at least, on average.
        detail: what is worth knowing of the case, for the result.
        inspect: looks at the last state and results: adds to the detail what is only known then.
            Raises WrongResultError if it finds a wrong result.
        parts: what the operation consists of, as steps on the same data, each to be timed alone.
    """

    step: Step[State, Operands, Result]
    state: State
    operands: Operands
    calls: int
    traffic: Traffic
    anew: bool = False
    detail: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    inspect: Callable[[State, list[Result]], Mapping[str, Any]] | None = None
    parts: Mapping[str, Step[State, Operands, Any]] = dataclasses.field(default_factory=dict)


AnyWork = Work[Any, Any, Any]


class Case(Protocol):
    """The sizes of a case. A frozen dataclass."""

    def small(self) -> Self:
        """The same case, small enough for a CPU."""
        ...

    def memory(self) -> Memory:
        """About how much it allocates."""
        ...

    def build(self, backend: Backend) -> AnyWork:
        """Allocate the operands.

        Raises:
            NotImplementedError: if the operation does not support the case.
        """
        ...


def bind(operation: Callable[..., Any], backend: Backend) -> Callable[..., Any]:
    """`operation` with its backend fixed; one with a reference only takes no such argument.

    Raises:
        NotImplementedError: if the operation has no such implementation.
    """
    if "backend" in inspect.signature(operation).parameters:
        return functools.partial(operation, backend=backend)
    if backend != "reference":
        raise NotImplementedError(f"{operation.__name__} has no {backend} implementation")
    return operation
