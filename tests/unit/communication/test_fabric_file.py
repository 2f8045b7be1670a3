"""Links of the user's own: what a file may say, and one line for every mistake."""

import json

import pytest

from gnnpred.communication.collectives import collective_ms, estimate_collective
from gnnpred.communication.fabrics import load_fabric_file, resolve_fabric
from gnnpred.errors import GnnpredError, UsageError
from gnnpred.hardware import find_device

T4 = find_device("T4")
OWN = """
[intra_node]
name = "blue links"
rate_gb_s = 100
efficiency = 0.5
latency_us = 20
gpus_per_node = 4
[inter_node]
name = "blue network"
rate_gbit_s = 80
ports_per_node = 2
efficiency = 0.9
latency_us = 30
like = "ib200"
"""


@pytest.fixture
def own(tmp_path):
    path = tmp_path / "own.toml"
    path.write_text(OWN)
    return path


def test_a_file_of_links_is_used_and_named(own):
    fabric = resolve_fabric(device=T4, gpus=8, nodes=2, custom=load_fabric_file(own))
    assert fabric.description == "blue links (100 GB/s each way) + 2xblue network per node"
    assert fabric.warnings == ()
    assert fabric.network_gb_s_per_domain == 20
    estimate = estimate_collective("all_reduce", 1e8, fabric)
    assert not estimate.measured
    assert "own" in estimate.basis


def test_rate_efficiency_and_latency_decide_the_time(own):
    custom = load_fabric_file(own)
    pair = resolve_fabric(device=T4, gpus=2, nodes=1, custom=custom)
    assert collective_ms("all_reduce", 1, pair) == pytest.approx(0.020, rel=1e-3)
    assert collective_ms("all_reduce", 1e10, pair) == pytest.approx(200, rel=0.01)  # 1e10 bytes over 50 GB/s
    assert resolve_fabric(device=T4, gpus=8, nodes=1, custom=custom).warnings  # four GPUs a node


def test_json_is_read_too_and_what_is_left_out_is_said(tmp_path):
    path = tmp_path / "own.json"
    path.write_text(json.dumps({"intra_node": {"rate_gb_s": 28}}))
    fabric = resolve_fabric(device=T4, gpus=4, nodes=1, custom=load_fabric_file(path))
    assert fabric.intra.like == "pcie4"
    assert any("no efficiency and latency_us: as on pcie4" in warning for warning in fabric.warnings)
    across = resolve_fabric(device=T4, gpus=4, nodes=2, custom=load_fabric_file(path))
    assert any("inter-node network not given" in warning for warning in across.warnings)


def test_a_link_is_not_named_twice(own):
    custom = load_fabric_file(own)
    with pytest.raises(UsageError, match=r"--interconnect.*exclude each other"):
        resolve_fabric(device=T4, gpus=8, nodes=2, interconnect="pcie3", custom=custom)
    with pytest.raises(UsageError, match=r"--inter-node.*exclude each other"):
        resolve_fabric(device=T4, gpus=8, nodes=2, inter_node="ib100", custom=custom)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is empty"),
        ("rate_gb_s = 3", "unknown table or field 'rate_gb_s'"),
        ("[intra_node", "not valid TOML"),
        ("intra_node = 3", "intra_node must be a table"),
        ("[intra_node]\nname = 'x'", "intra_node.rate_gb_s is missing"),
        ("[inter_node]\nports_per_node = 1", "inter_node.rate_gbit_s is missing"),
        ("[intra_node]\nrate_gb_s = 0", "rate_gb_s must be a number from 0.001"),
        ("[intra_node]\nrate_gb_s = -5", "rate_gb_s must be a number"),
        ("[intra_node]\nrate_gb_s = nan", "rate_gb_s must be a number"),
        ("[intra_node]\nrate_gb_s = true", "rate_gb_s must be a number"),
        ("[intra_node]\nrate_gb_s = '12'", "rate_gb_s must be a number"),
        ("[intra_node]\nrate_gb_s = 1e9", "rate_gb_s must be a number"),
        ("[intra_node]\nrate_gb_s = 9\nefficiency = 1.5", "efficiency must be a number from 0.001 to 1"),
        ("[intra_node]\nrate_gb_s = 9\nlatency_us = 0", "latency_us must be a number"),
        ("[intra_node]\nrate_gb_s = 9\ngpus_per_node = 2.5", "gpus_per_node must be a whole number"),
        ("[intra_node]\nrate_gb_s = 9\nrate_gb = 9", "did you mean rate_gb_s"),
        ("[intra_node]\nrate_gb_s = 9\nlike = 'nvlnk3'", "did you mean"),
        ("[intra_node]\nrate_gb_s = 9\nname = ''", "name must be a text"),
        ("[intra_node]\nrate_gb_s = 9\nname = 'a\\nb'", "name must be a text"),
        ('[intra_node]\nrate_gb_s = 9\nname = "a\\u001b[2J"', "name must be a text"),
        ("[inter_node]\nrate_gbit_s = 9\nports_per_node = 0", "ports_per_node must be a whole number from 1 to 64"),
        ("[inter_node]\nrate_gbit_s = 9\nlike = 'pigeon'", "unknown fabric 'pigeon'"),
    ],
)
def test_every_mistake_is_one_line_that_names_the_field(tmp_path, text, message):
    path = tmp_path / "bad.toml"
    path.write_text(text.replace("'a\\nb'", '"a\\nb"'))
    with pytest.raises(GnnpredError) as caught:
        load_fabric_file(path)
    assert message in str(caught.value)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_files_that_are_none_are_refused(tmp_path):
    with pytest.raises(GnnpredError, match="cannot read"):
        load_fabric_file(tmp_path / "absent.toml")
    with pytest.raises(GnnpredError, match="cannot read"):
        load_fabric_file(tmp_path)
    binary = tmp_path / "binary.toml"
    binary.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(GnnpredError, match="not text"):
        load_fabric_file(binary)
    large = tmp_path / "large.toml"
    large.write_text("#" * (1 << 20) + "\n")
    with pytest.raises(GnnpredError, match="larger than 1 MiB"):
        load_fabric_file(large)
    deep = tmp_path / "deep.json"
    deep.write_text("[" * 100_000)
    with pytest.raises(GnnpredError, match="not valid JSON"):
        load_fabric_file(deep)
    listed = tmp_path / "list.json"
    listed.write_text("[]")
    with pytest.raises(GnnpredError, match="must hold tables"):
        load_fabric_file(listed)
