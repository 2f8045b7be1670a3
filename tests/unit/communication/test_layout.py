"""Which fabric each group uses."""

import pytest

from gnnpred.communication.layout import layout_of
from gnnpred.hardware import find_device
from gnnpred.job import JobSpec

A100 = find_device("A100-SXM4-80GB")


def _layout(device=A100, **options):
    return layout_of(JobSpec(device=device, batch_size=1, **options))


def test_plain_ddp_uses_the_whole_cluster():
    layout = _layout(gpus=16, nodes=2)
    assert layout.data == layout.whole == layout.replicas
    assert (layout.tensor.gpus, layout.stage.gpus, layout.shard.gpus) == (1, 1, 1)
    assert _layout(gpus=16, nodes=2, strategy="fsdp").shard == layout.whole
    assert layout.description == layout.whole.description


def test_tensor_groups_are_neighbours_data_next_stages_outermost():
    layout = _layout(gpus=32, nodes=4, tensor_parallel=4, pipeline_parallel=2, microbatches=4, inter_node="8xib200")
    # dp = 4: two ranks of a group in each of two nodes; a stage fills two nodes
    assert (layout.tensor.gpus, layout.tensor.inter) == (4, None)
    assert (layout.data.gpus, layout.data.nodes) == (4, 2)
    assert (layout.stage.gpus, layout.stage.nodes) == (2, 2)


@pytest.mark.parametrize(("tp", "share"), [(1, 1), (2, 1 / 2), (8, 1 / 8)])
def test_groups_that_cross_nodes_share_the_ports_of_a_node(tp, share):
    layout = _layout(gpus=32, nodes=4, tensor_parallel=tp, inter_node="8xib200")
    whole = layout.whole.network_gb_s_per_domain
    assert layout.data.network_gb_s_per_domain == pytest.approx(whole * share)
    assert layout.data.gpus == 32 // tp
    assert layout.data.nodes == 4


def test_hybrid_shards_stay_inside_the_node():
    layout = _layout(gpus=32, nodes=4, strategy="fsdp", shard_group=8, inter_node="8xib200")
    assert (layout.shard.gpus, layout.shard.inter) == (8, None)
    assert (layout.replicas.gpus, layout.replicas.nodes) == (4, 4)
    assert layout.replicas.network_gb_s_per_domain == pytest.approx(layout.whole.network_gb_s_per_domain / 8)


def test_a_rack_counts_as_one_node():
    rack = find_device("GB200")
    inside = _layout(rack, gpus=64, nodes=16, tensor_parallel=8)
    assert inside.data.inter is None
    across = _layout(rack, gpus=144, nodes=36, tensor_parallel=8, inter_node="4xib400")
    assert (across.tensor.inter, across.data.nodes) == (None, 2)
    # nine groups' ranks of a rack share the ports of its 18 nodes with the seven others
    assert across.data.network_gb_s_per_domain == pytest.approx(across.whole.network_gb_s_per_domain / 8)


def test_bridged_pairs_use_their_bridge():
    rtx = find_device("RTX3090")
    layout = _layout(rtx, gpus=4, tensor_parallel=2, interconnect="nvlink-bridge")
    assert layout.tensor.intra.name == "nvlink-bridge"
    assert layout.data.intra.name.startswith("pcie")


def test_the_description_names_every_group():
    text = _layout(
        gpus=32, nodes=4, tensor_parallel=8, pipeline_parallel=2, microbatches=2, inter_node="8xib200"
    ).description
    assert text.split("; ") == [
        "tp 8: nvlink3 (300 GB/s each way)",
        "dp 2: ib200, 25 GB/s each way",
        "pp 2: ib200, 25 GB/s each way",
    ]
