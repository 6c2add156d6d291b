import pytest

from dhisparse_jax.errors import UserError
from dhisparse_jax.models.train.corpus import EVALUATION_MODULES, SEPARATOR, load_corpus

FILLER = "# a line of ordinary source text, long enough to be kept as a document\n"


@pytest.fixture
def library(tmp_path):
    def write(name, text):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text if isinstance(text, bytes) else text.encode())

    for module in EVALUATION_MODULES:
        write(f"{module}.py", f"secret_{module}\n" + FILLER)
        write(f"test/test_{module}.py", f"secret_test_{module}\n" + FILLER)
    write("test/test_tarfile_extra.py", "secret_extra\n" + FILLER)
    write("test/test_argparse/cases.py", "secret_case\n" + FILLER)
    write("site-packages/other.py", "secret_package\n" + FILLER)
    write("b.py", "public_b\n" + FILLER)
    write("a.py", "public_a\n" + FILLER)
    write("test/test_a.py", "public_test\n" + FILLER)
    write("empty.py", "")
    write("latin.py", FILLER.encode() + b"\xe9")
    write("binary.py", FILLER.encode() + b"\x00")
    return tmp_path


def test_left_out_modules_and_their_tests_never_enter_training(library):
    corpus = load_corpus(library)
    stream = corpus.stream.tobytes()
    assert b"secret" not in stream
    assert list(corpus.evaluation) == [f"{module}.py" for module in EVALUATION_MODULES]
    assert corpus.evaluation["heapq.py"].startswith(b"secret_heapq")


def test_documents_are_sorted_and_separated(library):
    corpus = load_corpus(library)
    assert corpus.documents == 3
    documents = corpus.stream.tobytes().split(bytes([SEPARATOR]))
    assert [text.split(b"\n")[0] for text in documents] == [
        b"",
        b"public_a",
        b"public_b",
        b"public_test",
        b"",
    ]


def test_the_digest_follows_the_text(library):
    before = load_corpus(library)
    assert load_corpus(library).digest == before.digest
    (library / "a.py").write_text("changed\n" + FILLER)
    after = load_corpus(library)
    assert after.digest != before.digest
    assert after.record()["train_bytes"] == after.stream.size


def test_unusable_folders_are_refused(tmp_path):
    with pytest.raises(UserError, match=r"argparse\.py"):
        load_corpus(tmp_path)
    for module in EVALUATION_MODULES:
        (tmp_path / f"{module}.py").write_text(FILLER)
    with pytest.raises(UserError, match="no Python sources"):
        load_corpus(tmp_path)


def test_the_standard_library_serves():
    corpus = load_corpus()
    assert corpus.stream.size > 5e6
    assert min(len(text) for text in corpus.evaluation.values()) > 10_000
