"""The command on the real engine and small random checkpoints: nothing is replaced here."""

import dataclasses
import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from bench.replay import as_recorded, replay
from bench.simulate import figures
from dhisparse_jax.engine.recording import read_recording
from dhisparse_jax.models.checkpoint import load_checkpoint
from dhisparse_jax.models.draft.checkpoint import make_draft, save_draft
from dhisparse_jax.models.glm.dense import forward
from dhisparse_jax.models.params import params_of
from tests.support.checkpoints import CONTEXT, TOKENS, write_own, write_published
from tests.support.small_draft import CONFIGS, noisy
from tests.support.small_glm import FIXTURES

STAGES = (
    "append",
    "select",
    "plan",
    "retrieve",
    "attend",
    "commit",
    "backup",
    "adapt",
    "verify",
    "accept",
)
POLICIES = ("resident", "fixed", "adaptive")
ALPHABET = pre_tokenizers.ByteLevel.alphabet()


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    folder = tmp_path_factory.mktemp("published")
    write_published(folder)
    return folder


@pytest.fixture(scope="module")
def own(tmp_path_factory):
    folder = tmp_path_factory.mktemp("own")
    write_own(folder, bos_token_id=0)
    return folder


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("split", [1, 17, TOKENS])
def test_verify_hf_passes(run, published, policy, split):
    result = run("verify-hf", published, "--policy", policy, "--split", split, "--hot-rows", 3)
    assert result.code == 0, result.last_json
    verdict = result.last_json
    assert verdict["argmax_agreement"] == 1.0
    assert (verdict["fetched_rows"] > 0) is (policy != "resident" and split < TOKENS)


@pytest.mark.parametrize(
    ("split", "queries", "policy"),
    [
        (17, 4, "adaptive"),
        pytest.param(1, 1, "fixed", marks=pytest.mark.slow),
        pytest.param(30, 1, "resident", marks=pytest.mark.slow),
        pytest.param(1, 4, "fixed", marks=pytest.mark.slow),
        pytest.param(1, 4, "resident", marks=pytest.mark.slow),
        pytest.param(30, 1, "adaptive", marks=pytest.mark.slow),
        pytest.param(17, 4, "fixed", marks=pytest.mark.slow),
    ],
)
def test_deepseek_v32_is_what_transformers_computes(run, policy, split, queries):
    folder = FIXTURES / "deepseek_v32_tiny"
    result = run(
        "verify-hf", folder, "--policy", policy, "--split", split, "--queries", queries,
        "--hot-rows", 5,
    )  # fmt: skip
    assert result.code == 0, result.last_json
    assert result.last_json["queries"] == queries
    assert (result.last_json["fetched_rows"] > 0) is (policy != "resident")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("split", "queries", "policy"), [(30, 1, "adaptive"), (5, 4, "fixed"), (49, 1, "resident")]
)
def test_deepseek_v41_is_what_the_numpy_model_computes(run, policy, split, queries):
    result = run(
        "verify-hf", FIXTURES / "deepseek_v41_tiny", "--policy", policy, "--split", split,
        "--queries", queries, "--hot-rows", 2,
    )  # fmt: skip
    assert result.code == 0, result.last_json
    assert "3 tensors are of parts of the model that are not used" in result.err


@pytest.mark.slow
def test_fp8_history_is_near_the_reference(run):
    """With its format's error and no other: too much for the tolerance of float32."""
    folder = FIXTURES / "deepseek_v32_tiny"
    fp8 = ["--kv-format", "fp8", "--index-format", "fp8", "--hot-rows", 5]
    result = run("verify-hf", folder, *fp8, "--split", 17, "--queries", 4, "--tolerance", 10)
    assert result.code == 0, result.last_json
    assert result.last_json["max_abs_diff"] > 1e-3
    assert result.last_json["argmax_agreement"] > 0.5
    assert result.last_json["fetched_rows"] > 0


def chat_checkpoint(folder, **generation):
    """A checkpoint with a byte-level tokenizer and a chat template."""
    write_published(folder)
    tokenizer = Tokenizer(
        models.BPE(vocab={c: n for n, c in enumerate(sorted(ALPHABET))}, merges=[])
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    template = "<{{ messages[0].role }}>{{ messages[0].content }}</>"
    (folder / "chat_template.jinja").write_text(template)
    (folder / "generation_config.json").write_text(json.dumps(generation))


@pytest.mark.slow
def test_chat_renders_the_message_and_ends_at_every_id(run, tmp_path, prompt):
    pytest.importorskip("jinja2")
    chat_checkpoint(tmp_path)
    files = ["-p", prompt("a", b"abc"), "-n", 12, "--policy", "resident"]
    arguments = ["decode", "-m", tmp_path, *files, "--json", tmp_path / "run.json"]
    assert run(*arguments, "--chat").code == 0
    (chat,) = json.loads((tmp_path / "run.json").read_text())["requests"]
    assert chat["prompt_tokens"] == len("<user>abc</>")
    chat_checkpoint(tmp_path, eos_token_id=[999, chat["tokens"][4]])
    assert run(*arguments, "--chat").code == 0
    (ended,) = json.loads((tmp_path / "run.json").read_text())["requests"]
    assert ended["tokens"] == chat["tokens"][: chat["tokens"].index(chat["tokens"][4]) + 1]
    assert ended["finish_reason"] == "stop"


def test_chat_without_a_template_is_refused(run, published, prompt):
    error = run("decode", "-m", published, "-p", prompt("a", b"abc"), "--chat").error
    assert "has no chat template" in error


def test_unused_mtp_tensors_are_one_line(run, tmp_path, prompt):
    write_published(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    extra = {
        f"model.layers.3.{name}.weight": np.ones((2, 2), np.float32)
        for name in ("enorm", "eh_proj")
    }
    save_file(tensors | extra, tmp_path / "model.safetensors")
    result = run("verify-hf", tmp_path, "--split", TOKENS)
    assert result.code == 0
    assert result.err == f"{tmp_path}: 2 tensors are of parts of the model that are not used\n"
    converted = run("convert", tmp_path, tmp_path / "out")
    assert converted.last_json["unused_tensors"] == sorted(extra)


def test_verify_hf_sees_a_changed_weight(run, published, tmp_path):
    write_published(tmp_path, seed=1)
    np.save(tmp_path / "logits.npy", np.load(published / "logits.npy"))
    result = run("verify-hf", tmp_path, "--split", TOKENS)
    assert result.code == 1
    assert result.last_json["max_abs_diff"] > 0.1


@pytest.mark.slow  # as engine/test_policies.py, through the command
def test_policies_give_the_same_tokens(run, published, tmp_path, prompt):
    files = [prompt(f"p{n}", bytes(range(65, 65 + n))) for n in (5, 40, 90)]
    arguments = [item for path in files for item in ("-p", path)]
    documents = {}
    for policy in POLICIES:
        path = tmp_path / f"{policy}.json"
        result = run(
            "decode", "-m", published, *arguments, "-n", 14, "--batch", 2, "--hot-rows", 10,
            "--policy", policy, "--json", path,
        )  # fmt: skip
        assert result.code == 0
        documents[policy] = json.loads(path.read_text())
    assert documents["fixed"]["requests"] == documents["resident"]["requests"]
    assert documents["adaptive"]["requests"] == documents["resident"]["requests"]
    assert [item["prompt_tokens"] for item in documents["fixed"]["requests"]] == [5, 40, 90]
    assert documents["resident"]["metrics"]["fetched_rows"] == 0
    assert documents["fixed"]["metrics"]["fetched_rows"] > 0
    sizes = {name: documents[name]["metrics"]["hot_bytes"] for name in POLICIES}
    assert sizes["fixed"] == sizes["adaptive"] < sizes["resident"]


@pytest.fixture(scope="module")
def drafts(tmp_path_factory):
    """Random drafts for `published`, one with a candidate selector and one with a Markov head."""
    folder = tmp_path_factory.mktemp("drafts")
    for kind in ("dflash2", "dspark"):
        config = dataclasses.replace(
            CONFIGS[kind], vocab_size=256, target_layers=3, taps=(0, 2), mask_token_id=255
        )
        model = make_draft(config, jnp.float32)
        save_draft(folder / kind, config, noisy(params_of(model)))
    return folder


def decoded(run, published, tmp_path, *arguments):
    """The document of a run of three prompts over two rows."""
    files = [tmp_path / f"p{n}" for n in (5, 40, 90)]
    for path, length in zip(files, (5, 40, 90), strict=True):
        path.write_bytes(bytes(range(65, 65 + length)))
    paths = [item for path in files for item in ("-p", path)]
    document = tmp_path / "out.json"
    sizes = ("-n", 14, "--batch", 2, "--hot-rows", 10, "--json", document)
    result = run("decode", "-m", published, *paths, *sizes, *arguments)
    assert result.code == 0, result.err
    return json.loads(document.read_text())


PLAIN = {}


@pytest.mark.parametrize(
    ("kind", "length", "policy"),
    [
        pytest.param("dflash2", None, "adaptive", marks=pytest.mark.slow),
        pytest.param("dspark", "auto", "fixed", marks=pytest.mark.slow),
    ],
)
def test_drafts_give_the_same_tokens(run, published, drafts, tmp_path, kind, length, policy):
    plain = PLAIN.get("run") or decoded(run, published, tmp_path)
    PLAIN["run"] = plain  # one for both cases
    options = ("--draft-length", length) if length else ()
    drafted = decoded(
        run, published, tmp_path, "--policy", policy, "--draft", drafts / kind, *options
    )
    assert drafted["requests"] == plain["requests"]
    assert (plain["draft"], drafted["draft"]) == ("none", str(drafts / kind))
    assert plain["metrics"]["accept_length"] == 1.0
    metrics = drafted["metrics"]
    assert len(metrics["accept_by_position"]) == 3
    assert metrics["accept_length"] == pytest.approx(1 + sum(metrics["accept_by_position"]))
    assert metrics["draft_seconds"] > 0
    assert metrics["verify_seconds"] <= metrics["decode_seconds"]
    assert metrics["draft_bytes"] > 0


@pytest.mark.slow
def test_recorded_selections_replay_to_what_was_fetched(run, published, drafts, tmp_path):
    path = tmp_path / "run.sel"
    drafted = ("--draft", drafts / "dflash2", "--policy", "adaptive")
    metrics = decoded(run, published, tmp_path, *drafted, "--record-selections", path)["metrics"]
    recording = read_recording(path)
    row = figures(recording.cfg, replay(recording.cfg, as_recorded(recording)))
    for name in ("steps", "selected_rows", "fetched_rows"):
        assert row[name] == metrics[name]
    assert metrics["fetched_rows"] > 0


def test_draft_for_another_target_is_refused(run, published, drafts, tmp_path, prompt):
    path = ("-p", prompt("a", b"x"))
    for change, message in (
        ({"vocab_size": 64, "mask_token_id": 63}, "64"),
        ({"target_hidden_size": 16}, "16"),
        ({"target_layers": 9, "taps": (0, 7)}, "9"),
    ):
        fitting = {"vocab_size": 256, "target_layers": 3, "mask_token_id": 255}
        config = dataclasses.replace(CONFIGS["dflash2"], **(fitting | change))
        params = params_of(make_draft(config, jnp.float32))
        save_draft(tmp_path / message, config, params)
        assert message in run("decode", "-m", published, *path, "--draft", tmp_path / message).error
    error = run("decode", "-m", published, *path, "--draft", drafts / "dspark", "--draft-length", 9)
    assert "draft length 9 is not possible" in error.error
    error = run("decode", "-m", published, *path, "--draft-length", 2)
    assert "--draft-length needs a draft" in error.error
    assert "unknown draft nothing" in run("decode", *path, "--draft", "nothing").error


@pytest.mark.slow
def test_sampling_repeats_with_its_seed(run, published, prompt):
    path = prompt("a", b"some text")
    texts = [
        run("decode", "-m", published, "-p", path, "-n", 12, "--temperature", 1, "--seed", seed).out
        for seed in (3, 3, 4)
    ]
    assert texts[0] == texts[1] != texts[2]


def test_trace_names_the_stages_of_a_step(run, published, tmp_path):
    decoded(run, published, tmp_path, "--trace-dir", tmp_path)
    (trace,) = tmp_path.rglob("*.xplane.pb")
    data = trace.read_bytes()
    assert b"decode_step" in data
    missing = [stage for stage in STAGES if f"/{stage}/".encode() not in data]
    assert missing == []


@pytest.mark.slow
def test_evaluate_agrees_with_the_whole_sequence_forward(run, own, prompt):
    text = bytes(range(60, 130))
    result = run("evaluate", "-m", own, prompt("a", text), "--policy", "fixed", "--hot-rows", 4)
    _, model = load_checkpoint(own, dtype=jnp.float32)
    tokens = jnp.asarray([[0, *text]], jnp.int32)  # byte 0 starts every text of such a model
    log_p = jax.nn.log_softmax(forward(model, tokens, mode="sparse")[0, :-1])
    bits = -float(log_p[np.arange(len(text)), np.asarray(tokens[0, 1:])].sum()) / math.log(2)
    assert result.code == 0
    assert result.last_json["bits_per_byte"] == pytest.approx(bits / len(text), rel=1e-4)


@pytest.mark.slow
def test_evaluate_reads_a_long_file_in_windows(run, own, prompt):
    text = bytes(range(32, 127)) * 5
    result = run("evaluate", "-m", own, prompt("a", text))
    assert len(text) > 2 * CONTEXT
    assert result.code == 0
    assert 0 < result.last_json["bits_per_byte"] < 30


def test_prompt_longer_than_the_context_is_refused(run, published, prompt):
    error = run("decode", "-m", published, "-p", prompt("a", b"x" * CONTEXT)).error
    assert f"a has {CONTEXT} tokens" in error
    assert f"shorten it to {CONTEXT - 1} or less" in error


def test_unknown_model_is_refused(run, prompt):
    error = run("decode", "-m", "huge", "-p", prompt("a", b"x")).error
    assert error.startswith("unknown model huge: neither a bundled one (tiny)")


def test_a_folder_without_a_checkpoint_is_refused(run, prompt, tmp_path):
    assert "config.json" in run("decode", "-m", tmp_path, "-p", prompt("a", b"x")).error


def test_convert_gives_a_checkpoint_that_verifies(run, published, tmp_path):
    target = tmp_path / "converted"
    result = run("convert", published, target)
    assert result.code == 0
    assert result.last_json["unused_tensors"] == []
    assert result.last_json["expert_format"] == "float"
    for name in ("inputs.npy", "logits.npy"):
        (target / name).write_bytes((published / name).read_bytes())
    assert run("verify-hf", target, "--split", TOKENS).code == 0
    assert "exists; name a new folder" in run("convert", published, target).error
