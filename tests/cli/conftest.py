"""Commands run in this process through their arguments; the network is a roofline that can be checked by hand."""

import json
from dataclasses import dataclass
from typing import Any

import pytest

from gnnpred.cli import run
from tests.helpers.onnx_files import save, small_cnn
from tests.helpers.roofline import RooflineCheckpoint
from tests.helpers.tiny_corpus import write_tiny_corpus


@dataclass(frozen=True)
class Outcome:
    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)

    def is_one_error_line(self) -> bool:
        return self.err.startswith("error: ") and self.err.count("\n") == 1 and "Traceback" not in self.err + self.out


@pytest.fixture
def cli(capsys):
    """``cli("predict", path, ...)`` -> code, stdout, stderr, with real checkpoints."""

    def call(*arguments: object) -> Outcome:
        capsys.readouterr()
        code = run([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        return Outcome(code, captured.out, captured.err)

    return call


@pytest.fixture
def gnnpred(cli, monkeypatch):
    """:func:`cli` with the roofline in place of the network."""
    monkeypatch.setattr("gnnpred.checkpoint.load_checkpoint", lambda name=None: RooflineCheckpoint())
    return cli


@pytest.fixture(scope="module")
def datasets(tmp_path_factory):
    """A corpus of five tiny families."""
    return write_tiny_corpus(tmp_path_factory.mktemp("tiny") / "datasets")


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    """A folder in which its rows are encoded once."""
    return tmp_path_factory.mktemp("work")


@pytest.fixture
def cnn(tmp_path):
    return save(small_cnn(), tmp_path, "cnn.onnx")
