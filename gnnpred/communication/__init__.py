"""Communication of a distributed training step: fabrics, collectives, and the timeline of a step."""

from gnnpred.communication.collectives import collective_ms, estimate_collective
from gnnpred.communication.fabrics import (
    ClusterFabric,
    inter_node_names,
    intra_node_names,
    load_fabric_file,
    resolve_fabric,
)
from gnnpred.communication.timeline import StepTimeline, step_spread, step_timeline

__all__ = [
    "ClusterFabric",
    "StepTimeline",
    "collective_ms",
    "estimate_collective",
    "inter_node_names",
    "intra_node_names",
    "load_fabric_file",
    "resolve_fabric",
    "step_spread",
    "step_timeline",
]
