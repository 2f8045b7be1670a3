"""Which GPUs form the groups of a job, and what each group talks over.

Ranks are numbered as Megatron-LM and DeepSpeed do by default: tensor parallelism innermost (neighbours inside a node),
then data parallelism, pipeline stages outermost. Ranks fill a node before the next one. All groups of a kind
communicate at the same time, so that those that cross nodes share the network ports of a node.
"""

from dataclasses import dataclass, replace

from gnnpred.communication.fabrics import ClusterFabric, find_intra_node, resolve_fabric
from gnnpred.errors import UsageError
from gnnpred.job import JobSpec


@dataclass(frozen=True, kw_only=True)
class Layout:
    """The fabrics of a job's groups."""

    whole: ClusterFabric
    tensor: ClusterFabric  # one product's GPUs
    data: ClusterFabric  # copies of one part of the model
    shard: ClusterFabric  # ranks that share one sharded copy
    replicas: ClusterFabric  # copies of one shard (hybrid sharding)
    stage: ClusterFabric  # two neighbouring pipeline stages
    expert: ClusterFabric  # ranks that share the experts
    expert_replicas: ClusterFabric  # copies of one expert
    description: str
    warnings: tuple[str, ...]


def layout_of(job: JobSpec) -> Layout:
    """The groups of a job; raises UsageError where they do not fit into its nodes."""
    whole = resolve_fabric(
        device=job.device,
        gpus=job.gpus,
        nodes=job.nodes,
        interconnect=job.interconnect,
        inter_node=job.inter_node,
        custom=job.fabric_file,
    )
    _check_nodes(job, whole)
    tp, dp, ep, shard = job.tensor_parallel, job.data_parallel, job.expert_parallel, job.shard_size

    def group(size: int, stride: int) -> ClusterFabric:
        return _group(job, whole, size, stride)

    layout = Layout(
        whole=whole,
        tensor=group(tp, 1),
        data=group(dp, tp),
        shard=group(shard, tp),
        replicas=group(dp // shard, tp * shard),
        stage=group(min(2, job.pipeline_parallel), tp * dp),
        expert=group(ep, tp),
        expert_replicas=group(dp // ep, tp * ep),
        description="",
        warnings=(),
    )
    return replace(layout, description=_describe(job, layout), warnings=_warnings(job, whole))


def _check_nodes(job: JobSpec, whole: ClusterFabric) -> None:
    intra = whole.intra
    limit = intra.domain_gpus if job.nodes == 1 and intra.domain_gpus else intra.max_gpus_per_node
    if job.gpus > 1 and job.gpus_per_node > limit:
        raise UsageError(
            f"{job.gpus_per_node} GPUs in one node: a {job.device.name} server with {intra.name} holds {limit}; "
            f"spread them with --nodes {-(-job.gpus // limit)}"
        )
    if job.tensor_parallel > whole.gpus_per_domain:
        raise UsageError(
            f"--tp {job.tensor_parallel} is more than the {whole.gpus_per_domain} GPUs that a node joins: its "
            "all-reduces wait for one another in every layer and have to stay inside; use --pp across nodes"
        )
    if whole.num_domains > 1 and whole.gpus_per_domain % job.tensor_parallel:
        raise UsageError(
            f"--tp {job.tensor_parallel} does not divide the {whole.gpus_per_domain} GPUs of a node: groups would lie "
            "in two nodes"
        )


def _group(job: JobSpec, whole: ClusterFabric, size: int, stride: int) -> ClusterFabric:
    """The fabric of ``size`` ranks that are ``stride`` apart."""
    if size == whole.gpus:
        return whole
    local = whole.gpus_per_domain
    per_domain = min(size, max(1, local // stride))
    domains = -(-size // per_domain)
    if domains == 1:
        return replace(whole, intra=_intra_of_pair(job, whole, size, stride)).subgroup(size, 1)
    # Domains count as nodes from here on: a rack's fabric brings the ports of all its nodes.
    ports = whole.ports_per_node * max(1, whole.nodes // whole.num_domains)
    part = replace(whole, intra=replace(whole.intra, domain_gpus=None), ports_per_node=ports)
    return part.subgroup(per_domain * domains, domains, groups_per_node=max(1, local // per_domain))


def _intra_of_pair(job: JobSpec, whole: ClusterFabric, size: int, stride: int):
    """Bridges join neighbours in pairs, whatever larger groups of the node have to use."""
    if size == 2 and stride == 1 and job.interconnect and "bridge" in job.interconnect:
        return find_intra_node(job.interconnect, job.device)
    return whole.intra


def _describe(job: JobSpec, layout: Layout) -> str:
    """The fabric in words; with several kinds of groups, that of each."""
    groups = {
        f"tp {job.tensor_parallel}": (job.tensor_parallel, layout.tensor),
        f"dp {job.data_parallel}": (job.data_parallel, layout.data),
        f"pp {job.pipeline_parallel}": (job.pipeline_parallel, layout.stage),
        f"ep {job.expert_parallel}": (job.expert_parallel, layout.expert),
    }
    if job.shard_size not in (1, job.data_parallel):
        groups[f"shard {job.shard_size}"] = (job.shard_size, layout.shard)
    used = {name: fabric for name, (size, fabric) in groups.items() if size > 1}
    if len(used) < 2:
        return layout.whole.description
    return "; ".join(f"{name}: {_where(fabric)}" for name, fabric in used.items())


def _where(fabric: ClusterFabric) -> str:
    if fabric.inter is None:
        return f"{fabric.intra.name} ({fabric.intra.one_way_gb_s:g} GB/s each way)"
    network = f"{fabric.inter.name}, {fabric.network_gb_s_per_domain:.3g} GB/s each way"
    return network if fabric.gpus_per_domain == 1 else f"{fabric.intra.name} + {network}"


def _warnings(job: JobSpec, whole: ClusterFabric) -> tuple[str, ...]:
    warnings = list(whole.warnings)
    if job.pipeline_parallel > 1 and job.num_microbatches < job.pipeline_parallel:
        warnings.append(
            f"{job.num_microbatches} micro-batches keep {job.pipeline_parallel} pipeline stages waiting: "
            f"give --microbatches {job.pipeline_parallel} or more"
        )
    return tuple(warnings)
