"""Communication of a distributed training step: fabrics, collectives, and the timeline of a step."""

from gnnpred.communication.fabrics import ClusterFabric, inter_node_names, intra_node_names, resolve_fabric
from gnnpred.communication.timeline import StepTimeline, step_spread, step_timeline

__all__ = [
    "ClusterFabric",
    "StepTimeline",
    "inter_node_names",
    "intra_node_names",
    "resolve_fabric",
    "step_spread",
    "step_timeline",
]
