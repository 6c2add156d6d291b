"""Runs over several devices against one, in processes of their own: they begin with other devices.

python -m tests.support.mesh_runs NAME ...      every NAME is a function below
"""

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
FIXTURES = ROOT / "tests" / "fixtures"
CONTEXT, HOST_PAGE = 96, 48


def on_devices(count, *names, **environment):
    """A process that runs some of the functions, with so many virtual devices."""
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={count}"
    # The directory of tests/conftest.py: what one of these tests compiles, the next may need.
    kept = {
        "JAX_COMPILATION_CACHE_DIR": str(ROOT / ".pytest_cache" / "xla"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }
    return subprocess.Popen(
        [sys.executable, "-m", "tests.support.mesh_runs", *names],
        cwd=ROOT,
        env={**os.environ, **kept, **environment, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def said(process):
    """What a process printed, by line; fails where it did."""
    out, err = process.communicate(timeout=540)
    assert process.returncode == 0, err[-3000:]
    return out.splitlines()


def requests(lengths, vocabulary, **options):
    """Requests with random prompts, of (prompt, new tokens)."""
    import numpy as np

    from dhisparse_jax.engine.request import Request

    rng = np.random.default_rng(3)
    draw = lambda length: tuple(rng.integers(0, vocabulary, length).tolist())
    return [
        Request(name=f"{length}+{new}", prompt=draw(length), max_new_tokens=new, **options)
        for length, new in lengths
    ]


def run(served, asked, rows, policy="adaptive", draft=None, mesh=None):
    """Tokens by request, and which device each was on; rows are those of all devices."""
    from dhisparse_jax.config import HierarchyConfig, Policy
    from dhisparse_jax.engine.engine import Engine
    from dhisparse_jax.engine.events import NewTokens
    from dhisparse_jax.speculation.protocol import NO_DRAFT

    model, params = served
    draft = draft or NO_DRAFT
    queries = draft.drafter.length + 1
    cfg = HierarchyConfig(
        geometry=model.geometry,
        policy=Policy(policy),
        requests=rows // (mesh.size if mesh else 1),
        capacity=CONTEXT,
        queries=queries,
        hot_rows=2 * model.geometry.top_k,
        tail=max(4, 2 * queries),
        host_page=HOST_PAGE,
    )
    engine = Engine(model, params, cfg, chunk=16, draft=draft, mesh=mesh)
    tokens, homes = {}, {}
    for event in engine.run(asked):
        homes |= {job.number: job.home for job in engine._roster}
        if isinstance(event, NewTokens):
            tokens.setdefault(event.request, []).extend(event.tokens)
    for machine in engine.machines:
        assert machine.ledger.idle
        assert not machine.sharing.pages.users.any()
    return tokens, homes


LENGTHS = ((33, 9), (5, 12), (20, 6), (47, 9), (12, 3), (50, 8), (17, 5), (28, 9), (3, 7), (41, 6))


def mesh_of(text):
    from dhisparse_jax.mesh import MeshShape

    return MeshShape.parse(text).mesh()


def toy(options):
    """The toy model: the same tokens as on one device, and requests on all of them.

    `options` is a policy, a comma, and `drafted` or nothing.
    """
    from tests.support.serving import model
    from tests.support.toy_draft import toy_draft

    policy, drafted = options.split(",")
    mesh = mesh_of("data=4,expert=2")
    asked = requests(LENGTHS, model()[0].vocabulary)
    alone, _ = run(model(), asked, 8, policy)
    draft = None
    if drafted:
        texts = [(*request.prompt, *alone[number]) for number, request in enumerate(asked)]
        draft = toy_draft(texts, length=3)
        assert run(model(), asked, 8, policy, draft)[0] == alone
    spread, homes = run(model(), asked, 8, policy, draft, mesh)
    assert spread == alone
    # The first requests found all devices empty.
    assert [homes[number] for number in range(mesh.size)] == list(range(mesh.size))


def checkpoint(name, mesh):
    """A published checkpoint: loads sharded, decodes to the same tokens as on one device."""
    import jax

    from dhisparse_jax.mesh import EXPERT
    from dhisparse_jax.models.registry import load

    places = (None, mesh_of(mesh))
    alone, spread = (load(str(FIXTURES / name), mesh=place) for place in places)
    count, asked = spread.mesh.size, requests(LENGTHS[:6], alone.model.vocabulary)
    wanted, _ = run((alone.model, alone.params), asked, 1)
    found, _ = run((spread.model, spread.params), asked, count, mesh=spread.mesh)
    assert found == wanted
    split = [leaf for leaf in jax.tree.leaves(spread.params) if EXPERT in leaf.sharding.spec]
    assert split
    count = spread.mesh.shape[EXPERT]
    for leaf in split:
        assert leaf.addressable_shards[0].data.shape[0] == leaf.shape[0] // count


def glm():
    checkpoint("glm_tiny", "data=2,expert=2")


def deepseek_v32():
    checkpoint("deepseek_v32_tiny", "expert=4")


def deepseek_v4():
    checkpoint("deepseek_v4_tiny", "data=2,expert=2")


def deepseek_v41():
    checkpoint("deepseek_v41_tiny", "data=2,expert=2")


def glm_sorted():
    """With experts run on sorted copies of tokens, as large models do."""
    from dhisparse_jax.models import experts

    experts._MAX_EXPERTS_ALL_RUN = 0
    glm()


def published(directory):
    """A small checkpoint with four experts, as `checkpoint`."""
    checkpoint(directory, "expert=2")


def quantised(directory):
    """A small checkpoint whose four experts stay as small as they are stored, as `checkpoint`."""
    checkpoint(directory, "data=2,expert=2")


def refusals():
    """More devices than there are."""
    refused(lambda: mesh_of("data=8"))


def experts_over_three():
    """An axis that does not divide the experts."""
    from dhisparse_jax.models.registry import load

    refused(lambda: load("tiny", mesh=mesh_of("expert=3")))


def refused(work):
    """The one line of an error."""
    from dhisparse_jax.errors import UserError

    try:
        work()
    except UserError as error:
        say(error)


def pair(count=2):
    """Several processes of one machine: they disagree, and then they do not."""
    import jax

    from dhisparse_jax.engine.agree import agree

    jax.distributed.initialize(os.environ["MESH_ADDRESS"], count, int(os.environ["MESH_PROCESS"]))
    refused(lambda: agree({"same": 1, "number": jax.process_index()}))


def smallest():
    """A model that compiles in a second or two, and requests for it."""
    from tests.support.toy_model import toy as make

    served = make(layers_per_pool=(1,), top_k=8, context=CONTEXT)
    return served, requests(LENGTHS[:5], served[0].vocabulary)


def toy_pair():
    """A toy model over the devices of two processes."""
    pair()
    served, asked = smallest()
    say(json.dumps(run(served, asked, 2, "fixed", mesh=mesh_of("data=2"))[0]))


def glm_pair():
    """Experts over two processes."""
    from dhisparse_jax.models.registry import load

    pair()
    loaded = load(str(FIXTURES / "glm_tiny"), mesh=mesh_of("expert=2"))
    asked = requests(LENGTHS[:6], loaded.model.vocabulary)
    say(json.dumps(run((loaded.model, loaded.params), asked, 4, mesh=loaded.mesh)[0]))


def say(what):
    """A line for the test."""
    sys.stdout.write(f"{what}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    for call in sys.argv[1:]:
        function, *given = call.split("=", maxsplit=1)
        globals()[function](*given)
        say(f"done {function}")
