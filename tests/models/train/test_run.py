import dataclasses
import json

import numpy as np
import pytest

from dhisparse_jax.errors import UserError
from dhisparse_jax.models.checkpoint import load_checkpoint
from dhisparse_jax.models.params import flatten, params_of
from dhisparse_jax.models.train.__main__ import configure, main, parse_arguments
from dhisparse_jax.models.train.backend import choose_backend
from dhisparse_jax.models.train.config import smoke_config
from dhisparse_jax.models.train.corpus import EVALUATION_MODULES, load_corpus
from dhisparse_jax.models.train.loop import Trainer
from dhisparse_jax.models.train.progress import Clock, PhaseProgress
from tests.support.small_glm import SMALL

pytestmark = pytest.mark.slow


# Two layers of one group: four steps and three evaluations are compiled.
SHALLOW = dataclasses.replace(
    SMALL, num_layers=2, indexer_types=("full", "shared"), param_dtype="bfloat16"
)


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    root = tmp_path_factory.mktemp("library")
    text = "def double(x):\n    return 2 * x\n\n\n" * 8
    for name in (*EVALUATION_MODULES, "first", "second"):
        (root / f"{name}.py").write_text(text)
    return root


@pytest.mark.slow
def test_a_run_leaves_a_checkpoint_weights_and_a_record(library, tmp_path):
    config = smoke_config(SHALLOW, seed=3, context=16, steps=2)
    Trainer(config, load_corpus(library), tmp_path, Clock(config.budget_seconds)).run()

    saved, model = load_checkpoint(tmp_path / "checkpoint")
    assert saved == config.model
    rounded = flatten(params_of(model))
    exact = {}
    for part in sorted(tmp_path.glob("weights_f32.*.npz")):
        exact |= dict(np.load(part))
    assert exact.keys() == rounded.keys()
    for name, array in exact.items():
        assert array.dtype == np.float32
        np.testing.assert_array_equal(rounded[name], array.astype(rounded[name].dtype))

    record = json.loads((tmp_path / "run.json").read_text())
    assert [phase["steps"] for phase in record["phases"]] == [2] * 4
    assert record["config"]["seed"] == 3
    assert record["corpus"]["documents"] == 2
    assert record["attention"] == "xla"
    assert {"sparse", "window", "dense", "xz"} == record["final"].keys()
    assert 4 < record["final"]["sparse"]["all"] < 12
    assert len(record["evaluations"]) == 4 + 3
    assert record["parameters"] == sum(array.size for array in exact.values())


def test_phases_share_the_time_that_is_left():
    config = smoke_config(SMALL, seed=0, context=16)
    clock = Clock(130.0)
    first = clock.seconds_for(0, config)
    assert first == pytest.approx(100 * config.phases[0].share, abs=1)
    assert clock.seconds_for(3, config) == pytest.approx(100, abs=1)
    late = Clock(130.0, started=clock.started - 200)
    assert late.seconds_for(3, config) == 0
    over = PhaseProgress(config.phases[3], 0.0, None, report_seconds=1.0)
    assert over.fraction >= 1


def test_errors_of_the_user_are_one_line_and_exit_code_two(tmp_path, capsys):
    code = main(["--out", str(tmp_path / "out"), "--corpus", str(tmp_path), "--smoke"])
    assert code == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "argparse.py" in error


def test_options_reach_the_settings(tmp_path):
    options = parse_arguments(
        ["--out", str(tmp_path), "--budget-seconds", "77", "--seed", "5", "--dropout", "0.2"]
    )
    config = configure(options)
    assert (config.budget_seconds, config.seed, config.dropout) == (77, 5, 0.2)


def test_cudnn_is_refused_where_it_cannot_be_used():
    config = dataclasses.replace(smoke_config(SMALL, seed=0, context=16), attention="cudnn")
    with pytest.raises(UserError, match="cuDNN attention cannot be used"):
        choose_backend(config)
    assert choose_backend(dataclasses.replace(config, attention="auto")) == "xla"
