"""Two workers on one study in a PostgreSQL server, which the test starts from the system's package."""

import os
import pwd
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

pytest.importorskip("torch_geometric")
pytest.importorskip("optuna")
pytest.importorskip("psycopg")

import optuna
import psycopg

from tests.helpers.tiny_corpus import write_tiny_corpus

pytestmark = pytest.mark.train
ROOT = Path(__file__).resolve().parents[2]


def program(name: str) -> str:
    places = [str(path) for path in sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)]
    found = shutil.which(name, path=os.pathsep.join([*places, os.environ.get("PATH", "")]))
    if not found:
        pytest.skip(f"PostgreSQL is not installed: no {name}")
    return found


@pytest.fixture
def server():
    """URL of a server that lives as long as the test."""
    initdb, postgres = program("initdb"), program("postgres")
    folder = Path(tempfile.mkdtemp())
    options: dict = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, "cwd": folder}
    if os.geteuid() == 0:  # the server refuses to run as root
        try:
            owner = pwd.getpwnam("postgres")
        except KeyError:
            pytest.skip("PostgreSQL does not run as root, and there is no user postgres")
        os.chown(folder, owner.pw_uid, owner.pw_gid)
        options |= {"user": owner.pw_uid, "group": owner.pw_gid, "extra_groups": []}
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    data = folder / "data"
    subprocess.run([initdb, "-D", data, "-U", "tester", "-A", "trust", "--no-sync"], check=True, **options)
    command = [postgres, "-D", data, "-p", str(port), "-c", "listen_addresses=127.0.0.1", "-k", folder, "-F"]
    process = subprocess.Popen(command, **options)
    url = f"postgresql+psycopg://tester@127.0.0.1:{port}/postgres"
    try:
        for _ in range(100):
            try:
                psycopg.connect(url.replace("+psycopg", ""), connect_timeout=1).close()
                break
            except psycopg.OperationalError:
                time.sleep(0.1)
        else:
            pytest.fail("the server did not start")
        yield url
    finally:
        process.send_signal(signal.SIGINT)  # ends open connections, where SIGTERM waits for them
        process.wait(30)
        shutil.rmtree(folder, ignore_errors=True)


def test_two_workers_share_a_study(server, tmp_path):
    datasets = write_tiny_corpus(tmp_path / "datasets")

    def worker(name: str) -> subprocess.Popen:
        command = [
            sys.executable, ROOT / "cli.py", "tune", "--recipe", "smoke", "--trials", "6", "--study", "shared",
            "--storage", server, "--datasets", datasets, "--work", tmp_path / "work", "--out", tmp_path / name,
        ]  # fmt: skip
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
            "OMP_NUM_THREADS": "1",
        }
        return subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)

    workers = [worker("one"), worker("two")]
    try:
        for running in workers:
            _, errors = running.communicate(timeout=900)
            assert running.returncode == 0, errors
    finally:
        for running in workers:
            running.kill()
            running.wait()
    trials = optuna.load_study(study_name="shared", storage=server).trials
    finished = [trial for trial in trials if trial.state.is_finished()]
    assert 6 <= len(finished) <= 7  # the other worker ends the trial that it has begun
    assert not [trial for trial in finished if trial.state is optuna.trial.TrialState.FAIL]
    assert len({tuple(sorted(trial.params.items())) for trial in finished}) >= len(finished) - 1
    assert (tmp_path / "one" / "best.toml").exists()
    assert (tmp_path / "two" / "best.toml").exists()
