"""What the decode benchmark asks of one GPU's share of a model, whatever its family."""

from collections.abc import Hashable, Mapping
from typing import Any, NamedTuple, Protocol

from jaxtyping import Array

from dhisparse_jax.config import HierarchyConfig
from dhisparse_jax.model import ServedModel
from dhisparse_jax.models.glm.costs import StepLoad, Work
from dhisparse_jax.speculation.protocol import Drafter


class Said(NamedTuple):
    """What a result says of a share: what of it is executed, and what is modelled."""

    executed: list[str]
    modelled: list[str]


class Shard(ServedModel, Protocol):
    """One GPU's share of a model. Its weights are any pytree, with None where a part has none.

    Attributes:
        config: sizes of the model.
        experts: routed experts per layer on this GPU.
        dtype: of the computation.
        selections: how many layers of each group select.
        survival: share of proposals that stand, by position, where nothing else is asked for.
        published_tokens: tokens per step that are published for its draft.
    """

    @property
    def config(self) -> Any: ...  # noqa: ANN401, D102

    @property
    def experts(self) -> int: ...  # noqa: D102

    @property
    def dtype(self) -> str: ...  # noqa: D102

    @property
    def selections(self) -> tuple[int, ...]: ...  # noqa: D102

    @property
    def survival(self) -> tuple[float, ...]: ...  # noqa: D102

    @property
    def published_tokens(self) -> float: ...  # noqa: D102

    def abstract_weights(self) -> Any:  # noqa: ANN401
        """Shapes of all weights."""
        ...

    def random_weights(self) -> Any:  # noqa: ANN401
        """Random weights, on the device."""
        ...

    def kind(self, pool: int) -> Hashable:
        """Groups of one kind have equal programs but for weights, traces and pools."""
        ...

    def begin_weights(self, weights: Any) -> Any:  # noqa: ANN401
        """Those that `embed` reads."""
        ...

    def group_weights(self, weights: Any, pool: int, stands: int) -> Any:  # noqa: ANN401
        """Those of a group, where those of the group that stands for its kind are."""
        ...

    def end_weights(self, weights: Any) -> Any:  # noqa: ANN401
        """Those that `logits` reads."""
        ...

    def vocabulary_of(self, weights: Any) -> tuple[Array, Array]:  # noqa: ANN401
        """Embedding `[V, D]` and head `[D, V]`, which a draft shares."""
        ...

    def draft(self, kind: str, weights: Any) -> tuple[Drafter, Any]:  # noqa: ANN401
        """A drafter of a kind, and shapes of what it takes.

        Raises:
            UserError: there is no such draft of this model.
        """
        ...

    def weight_bytes(self) -> Mapping[str, int]:
        """Bytes of the weights by stage."""
        ...

    def scores_bytes(self, cfg: HierarchyConfig) -> int:
        """What the largest scores of a step take beside what is always set aside for it."""
        ...

    def step_work(
        self, cfg: HierarchyConfig, load: StepLoad, draft_bytes: int
    ) -> Mapping[str, Work]:
        """What a step must do, by stage."""
        ...

    def expected(
        self, cfg: HierarchyConfig, context: int, tokens: float, draft_bytes: int, step: float
    ) -> dict[str, Any]:
        """What `dhisparse plan` says of a step that took so many seconds; nothing if it cannot."""
        ...

    def said(self, gpus: int) -> Said:
        """What every result says of it."""
        ...
