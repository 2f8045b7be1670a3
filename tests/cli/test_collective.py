"""gnnpred collective, through its arguments."""

import pytest

ALL_REDUCE = ("collective", "all_reduce", "--bytes", "100MB", "--gpus", 16, "--nodes", 2, "--device", "h100-sxm")
LINKS = ("--interconnect", "nvlink4", "--inter-node", "8xib400")


def test_it_prints_time_bandwidths_fabric_and_what_they_rest_on(cli):
    outcome = cli(*ALL_REDUCE, *LINKS)
    assert outcome.code == 0, outcome.err
    for text in ("100 MB", "16 x H100-SXM5-80GB on 2 nodes", "time", "algorithm bandwidth", "bus bandwidth",
                 "nvlink4 (450 GB/s each way) + 8xib400 per node", "measured"):  # fmt: skip
        assert text in outcome.out, text
    assert "!" not in outcome.out


def test_what_was_not_given_is_named(cli):
    outcome = cli(*ALL_REDUCE)
    assert "interconnect not given: assumed nvlink4" in outcome.out
    assert "inter-node network not given: assumed 8xib400" in outcome.out
    without_device = cli("collective", "all_gather", "--bytes", "1MB")
    assert "device not given: assumed A100-SXM4-80GB" in without_device.out


def test_json_holds_the_same_figures(cli):
    content = cli(*ALL_REDUCE, *LINKS, "--dtype", "bf16", "--json").json
    assert content["kind"] == "all_reduce"
    assert content["bytes"] == 1e8
    assert content["dtype"] == "bf16"
    assert content["algorithm_bandwidth_gb_s"] == pytest.approx(1e8 / content["time_ms"] / 1e6)
    assert content["bus_bandwidth_gb_s"] == pytest.approx(content["algorithm_bandwidth_gb_s"] * 2 * 15 / 16)
    assert content["measured"] is True
    assert content["warnings"] == []


def test_a_sweep_doubles_the_size(cli):
    content = cli("collective", "alltoall", "--sweep", "1MB:1GB", "--device", "H100", "--json").json
    sizes = [row["bytes"] for row in content["sizes"]]
    assert sizes == [1e6 * 2**power for power in range(10)]
    times = [row["time_ms"] for row in content["sizes"]]
    assert times == sorted(times)
    table = cli("collective", "alltoall", "--sweep", "1MB:1GB", "--device", "H100")
    assert table.code == 0
    assert "512 MB" in table.out


def test_outside_the_measured_range_it_says_so(cli):
    outcome = cli("collective", "all_reduce", "--bytes", "100TB", "--device", "H100", *LINKS[:2])
    assert "extrapolated by physics" in " ".join(outcome.out.split())


def test_links_of_ones_own(cli, tmp_path):
    path = tmp_path / "own.toml"
    path.write_text("[intra_node]\nname = 'blue'\nrate_gb_s = 40\nefficiency = 0.8\nlatency_us = 9\n")
    outcome = cli("collective", "send_recv", "--bytes", "1MB", "--device", "T4", "--fabric-file", path)
    assert outcome.code == 0, outcome.err
    assert "blue (40 GB/s each way)" in outcome.out
    path.write_text("[intra_node]\nspeed = 4\n")
    bad = cli("collective", "send_recv", "--bytes", "1MB", "--device", "T4", "--fabric-file", path)
    assert (bad.code, bad.is_one_error_line()) == (1, True)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("al_reduce", "--bytes", "1MB"), "did you mean all_reduce"),
        (("all_reduce",), "--bytes SIZE or --sweep"),
        (("all_reduce", "--bytes", "1MB", "--sweep", "1MB:2MB"), "one of them"),
        (("all_reduce", "--bytes", "many"), "is no size"),
        (("all_reduce", "--bytes", "-1"), "is no size"),
        (("all_reduce", "--sweep", "1MB"), "LOW:HIGH"),
        (("all_reduce", "--sweep", "2MB:1MB"), "must not be above"),
        (("all_reduce", "--bytes", "1MB", "--gpus", 1), "from 2 to"),
        (("all_reduce", "--bytes", "1MB", "--gpus", 10**9), "from 2 to"),
        (("all_reduce", "--bytes", "1MB", "--gpus", 9, "--nodes", 2), "divisible by --nodes"),
        (("all_reduce", "--bytes", "1MB", "--nodes", 0), "divisible by --nodes"),
        (("all_reduce", "--bytes", "1MB", "--device", "h100x"), "did you mean"),
        (("all_reduce", "--bytes", "1MB", "--device", "a100-sxm"), "A100-SXM4-40GB, A100-SXM4-80GB"),
        (("all_reduce", "--bytes", "1MB", "--interconnect", "nvlnk"), "unknown fabric"),
        (("all_reduce", "--bytes", "1MB", "--inter-node", "ib2000"), "unknown fabric"),
        (("all_reduce", "--bytes", "1MB", "--dtype", "fp99"), "unknown type"),
        (("all_reduce", "--bytes", "1MB", "--nccl-version", "new"), "--nccl-version"),
    ],
)
def test_mistakes_are_one_line_and_exit_with_2(cli, arguments, text):
    outcome = cli("collective", *arguments)
    assert outcome.code == 2
    assert outcome.is_one_error_line(), outcome.err
    assert text in outcome.err


def test_a_missing_file_exits_with_1(cli, tmp_path):
    outcome = cli("collective", "all_reduce", "--bytes", "1MB", "--fabric-file", tmp_path / "absent.toml")
    assert outcome.code == 1
    assert outcome.is_one_error_line()
