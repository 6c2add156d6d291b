"""The command in this process, on a fake engine."""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from dhisparse_jax.cli import session
from dhisparse_jax.cli.main import main
from dhisparse_jax.cli.report import Setting
from dhisparse_jax.cli.session import AS_STORED
from dhisparse_jax.speculation.protocol import NO_DRAFT
from tests.cli.fake_engine import FakeEngine, FakeLoaded, fake_teacher_force


@dataclass(frozen=True)
class Result:
    """What a call of the command left behind."""

    code: int
    out: bytes
    err: str

    @property
    def last_json(self) -> dict[str, Any]:
        return json.loads(self.out.splitlines()[-1])

    @property
    def error(self) -> str:
        """The one line of a refusal; fails where it is none."""
        lines = self.err.splitlines()
        assert self.code == 2
        assert self.out == b""
        assert len(lines) == 1
        assert lines[0].startswith("error: ")
        return lines[0].removeprefix("error: ")


Run = Callable[..., Result]


@dataclass
class Fake:
    """What the command gets in place of a model and an engine, and what it asked for."""

    engine: FakeEngine = field(default_factory=FakeEngine)
    loaded: FakeLoaded = field(default_factory=FakeLoaded)
    asked: dict[str, Any] = field(default_factory=dict)


@pytest.fixture
def run(capfdbinary: pytest.CaptureFixture[bytes]) -> Run:
    """Call the command with arguments; what it printed before is dropped."""

    def call(*arguments: object) -> Result:
        capfdbinary.readouterr()
        code = main([str(argument) for argument in arguments])
        out, err = capfdbinary.readouterr()
        return Result(code, out, err.decode())

    return call


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Fake:
    """Replace what loads models and builds engines."""
    given = Fake()

    def make_engine(loaded, options, **sizes):
        given.asked |= {"options": options, **sizes}
        return given.engine

    def load_model(name, dtype="float32", formats=AS_STORED, experts="stored", draft="none"):
        given.asked |= {"model": name, "dtype": dtype, "formats": formats}
        return given.loaded

    def load_draft(options, loaded):
        given.asked |= {"draft_options": options}
        return NO_DRAFT

    monkeypatch.setattr(session, "load_model", load_model)
    monkeypatch.setattr(session, "load_draft", load_draft)
    monkeypatch.setattr(session, "make_engine", make_engine)
    monkeypatch.setattr(session, "teacher_force", fake_teacher_force)
    monkeypatch.setattr(
        session,
        "setting_of",
        lambda loaded, policy, draft: Setting("tiny", "cpu", "0", policy.value, draft),
    )
    return given


@pytest.fixture
def prompt(tmp_path: Path) -> Callable[..., Path]:
    """Write a prompt file."""

    def write(name: str, data: bytes) -> Path:
        path = tmp_path / name
        path.write_bytes(data)
        return path

    return write
