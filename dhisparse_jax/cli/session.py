"""A model and an engine, made from the options. The only place that builds either."""

from typing import TYPE_CHECKING

from dhisparse_jax.cli.options import MOST_AT_ONCE, DtypeName, HierarchyOptions, PolicyName
from dhisparse_jax.cli.report import Setting

if TYPE_CHECKING:
    from dhisparse_jax.engine.engine import Engine
    from dhisparse_jax.models.registry import LoadedModel


def load_model(name: str, dtype: DtypeName = DtypeName.FLOAT32) -> "LoadedModel":
    """Load `tiny` or a checkpoint folder. Raises UserError where there is none that works."""
    from dhisparse_jax.models import registry

    return registry.load(name, dtype.value)


def make_engine(
    loaded: "LoadedModel", options: HierarchyOptions, *, requests: int, positions: int
) -> "Engine":
    """An engine with room for the work at hand.

    Args:
      loaded: the model.
      options: policy and sizes.
      requests: how many requests there are.
      positions: tokens of the longest request, prompt and new ones.

    Raises:
      UserError: the pools do not fit into memory.
    """
    from dhisparse_jax.config import Policy, plan_memory
    from dhisparse_jax.engine.engine import Engine

    policy = Policy(options.policy.value)
    config = plan_memory(
        loaded.model,
        policy=policy,
        hot_rows=options.hot_rows,
        requests=options.batch or min(requests, MOST_AT_ONCE),
        capacity=positions,
    )
    return Engine(loaded.model, config, policy)


def setting_of(loaded: "LoadedModel", policy: PolicyName) -> Setting:
    """What the run runs with."""
    import jax

    return Setting(
        model=loaded.name,
        backend=jax.default_backend(),
        jax_version=jax.__version__,
        policy=policy.value,
    )
