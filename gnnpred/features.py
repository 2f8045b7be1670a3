"""Numbers that the checkpoint sees: an op graph with its costs and a job, as numpy arrays.

Two steps, so that one graph serves many devices: :func:`graph_structure` (depends on graph, batch,
precision) collects raw costs per node and merges nodes that a 2-layer GNN cannot tell apart;
:func:`encode` adds the device and the job.

A **node** is a forward op together with what belongs to it in the other components (its gradients,
the casts autocast adds for it, gradient accumulation); the optimizer ops are nodes of their own.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from gnnpred.costs import CostState, OpCost, gemm_dims, unfused_attention_bytes
from gnnpred.graph import Component, DType, Op, OpGraph, Role
from gnnpred.hardware import DeviceSpec
from gnnpred.job import ActivationRule, JobSpec, Phase, Precision
from gnnpred.op_kinds import OP_KINDS, Category, category_of
from gnnpred.software import framework_version_number

FEATURE_SCHEMA_VERSION = 2

COMPONENTS: tuple[Component, ...] = tuple(Component)
NUM_COMPONENTS = len(COMPONENTS)
_COMPONENT_IDX = {component: i for i, component in enumerate(COMPONENTS)}
KIND_IDX: dict[str, int] = {kind: i for i, kind in enumerate(OP_KINDS)}  # ONE past the end: unknown
NUM_KINDS = len(OP_KINDS) + 1
CATEGORIES: tuple[Category, ...] = tuple(Category)
_CATEGORY_IDX = {category: i for i, category in enumerate(CATEGORIES)}
COMPUTE_DTYPES: tuple[DType, ...] = (DType.FP64, DType.FP32, DType.TF32, DType.FP16, DType.BF16, DType.FP8)
_DTYPE_IDX = {dtype: i for i, dtype in enumerate(COMPUTE_DTYPES)}

# A kernel that does nothing still occupies the GPU for about this long (empty-kernel time on
# Volta to Hopper is 1.5 to 2.5 us); the GNN corrects it per op.
KERNEL_FLOOR_US = 1.5
# cuDNN and MIOpen run 3x3 and 5x5 fp32 convolutions of stride 1 with Winograd's algorithm: F(2x2, 3x3) needs 2.25
# times fewer multiplications (Lavin and Gray, arXiv 1509.09308). Timed fp32 kernels agree: a factor of 2 below others.
WINOGRAD_GAIN = 2.25
# Grouped half-precision convolutions in NHWC have fast cuDNN kernels only for narrow groups, and enough of them; the
# backward of all others takes the same time per output element and tap, however wide the group. Fitted to 90 networks
# that were timed in both layouts with three PyTorch releases (RTX 3090, 1.10 to 1.12).
SLOW_GROUPED_FLOPS_PER_TAP = 4500.0
_CUDNN_8_3_PYTORCH = 1 + 12 / 20  # PyTorch 1.12 came with cuDNN 8.3, whose fast kernels cover more

# Power caps the clock of small cards. What a watt sustains in fp32 on the plain cores doubles about every five years:
# 0.06 TFLOP/s/W in 2018 (T4, 8.1 TFLOP/s at 70 W, sustains 3.3 to 4.5), 0.12 in 2023 (L4, 30 at 72 W, 9 to 11).
# Where the peak asks for less than that, the cap does nothing (V100, A100, H100: 0.05, 0.05, 0.10 asked for). A lower
# clock needs less voltage, so the rate falls more slowly than the power.
FP32_TFLOPS_PER_WATT_2018 = 0.06
_FP32_PER_WATT_GROWTH = 0.14  # per year, of the logarithm
_CLOCK_OF_POWER = 0.8  # exponent
# Large products reach 0.6 to 0.8 of a full tensor rate (V100, A100, H100, B200) and all of one that the vendor halved
# against its units (GeForce with fp32 accumulation: RTX 2080 Ti and 3090, 512 flop per SM and cycle in half types).
FULL_TENSOR_EFFICIENCY = 0.77
_HALVED_FLOP_PER_SM_CYCLE = 600.0
# Flash attention computes heads in tiles of 32 channels.
_HEAD_DIM_TILE = 32

# Pageable host-to-device copies reach about 6 GB/s on PCIe 3 hosts; the GNN corrects it.
HOST_COPY_GB_S = 6.0

_RAW_NAMES = (
    "in_elements", "param_elements", "out_elements", "batch_count", "m", "n", "k", "kernel_area", "stride", "groups",
    "channels_per_group", "last_dim", "in_bytes_per_element", "out_bytes_per_element",
    "needs_input_gradient", "is_depthwise", "is_parameter_derived", "m_mod8", "n_mod8", "k_mod8", "is_causal",
)  # fmt: skip
_RAW_IDX = {name: i for i, name in enumerate(_RAW_NAMES)}
_LOG_RAW = (
    "in_elements", "param_elements", "out_elements", "batch_count", "m", "n", "k", "kernel_area", "stride", "groups",
    "channels_per_group", "last_dim",
)  # fmt: skip
_PLAIN_RAW = tuple(name for name in _RAW_NAMES if name not in _LOG_RAW)


@dataclass(frozen=True)
class GraphStructure:
    """Merged nodes of one lowered (and, for training, differentiated) graph; no device in it.

    Shapes: N merged nodes, C = len(COMPONENTS), R = len(_RAW_NAMES), M ops of the graph.
    """

    kind_idx: np.ndarray  # (N,) int64
    category_idx: np.ndarray  # (N,) int64
    count: np.ndarray  # (N,) float64, how many ops of the graph one merged node stands for
    flops: np.ndarray  # (N, C) float64
    unit_idx: np.ndarray  # (N, C) int64, COMPUTE_DTYPES position whose peak bounds the flops; -1 = none
    on_tensor_cores: np.ndarray  # (N, C) bool, may the flops run on tensor cores
    bytes_moved: np.ndarray  # (N, C) float64
    unfused_bytes: np.ndarray  # (N, C) float64, the same where attention is not one fused kernel
    launches: np.ndarray  # (N, C) float64
    raw: np.ndarray  # (N, R) float64
    in_edges: np.ndarray  # (2, E) int64, rows source and target: data flows source -> target
    out_edges: np.ndarray  # (2, E') int64, rows source and target: target's reader is the source
    op_node_idx: np.ndarray  # (M,) int64, merged node of each op; -1 = costs nothing
    op_component_idx: np.ndarray  # (M,) int64
    op_weight: np.ndarray  # (M,) float64, share of the node's component that this op is
    input_bytes: float  # what a host copy moves per step
    batch_size: int


def _unit_of(op: Op, *, is_depthwise: bool) -> tuple[int, bool]:
    """Peak that bounds the op's flops, and whether tensor cores may run it."""
    category = category_of(op.kind)
    dtype = op.compute_dtype or DType.FP32
    is_product = category in (Category.CONV, Category.MATMUL, Category.ATTENTION, Category.RECURRENT)
    if is_product and not is_depthwise:
        return _DTYPE_IDX.get(dtype, 1), True
    # CUDA cores: fp64 has its own rate, everything else runs at the fp32 rate
    return (0, False) if dtype is DType.FP64 else (1, False)


def _first_shape(op: Op, graph: OpGraph) -> tuple[int, ...]:
    for tensor_idx in op.inputs:
        tensor = graph.tensors[tensor_idx]
        if tensor.role not in (Role.PARAMETER, Role.CONSTANT):
            return tensor.shape
    return graph.tensors[op.inputs[0]].shape if op.inputs else ()


def _raw_row(op: Op, graph: OpGraph) -> list[float]:
    """Shape features of one forward op, in the order of ``_RAW_NAMES``."""
    tensors = graph.tensors
    in_elements = param_elements = 0
    derived = True
    in_width = 0.0
    for tensor_idx in op.inputs:
        tensor = tensors[tensor_idx]
        if tensor.role in (Role.PARAMETER, Role.PARAMETER_DERIVED, Role.CONSTANT):
            param_elements += tensor.num_elements
        else:
            derived = False
            in_elements += tensor.num_elements
            in_width = max(in_width, tensor.dtype.bytes_per_element)
    out_elements = sum(tensors[t].num_elements for t in op.outputs)
    out_width = max((tensors[t].dtype.bytes_per_element for t in op.outputs), default=0.0)
    shape = _first_shape(op, graph)
    out_shape = tensors[op.outputs[0]].shape if op.outputs else ()
    batch_count, m, n, k = gemm_dims(op, graph) or (0, 0, 0, 0)
    kernel = op.attributes.get("kernel") or ()
    stride = op.attributes.get("stride") or ()
    groups = int(op.attributes.get("groups", 1) or 1)
    kernel_area = float(np.prod(kernel)) if kernel else 1.0
    channels = shape[1] if len(shape) >= 3 else (shape[-1] if shape else 1)
    is_depthwise = _is_depthwise(op, graph)
    return [
        in_elements, param_elements, out_elements, batch_count, m, n, k, kernel_area,
        float(stride[0]) if stride else 1.0, groups, channels / groups if groups else channels,
        out_shape[-1] if out_shape else 1, in_width, out_width,
        0.0, float(is_depthwise), float(derived and bool(op.inputs)),
        float(m > 0 and m % 8 == 0), float(n > 0 and n % 8 == 0), float(k > 0 and k % 8 == 0),
        float(op.kind == "sdpa" and bool(op.attributes.get("causal"))),
    ]  # fmt: skip


def _is_depthwise(op: Op, graph: OpGraph) -> bool:
    groups = int(op.attributes.get("groups", 1) or 1)
    if groups <= 1 or not op.kind.startswith("conv"):
        return False
    shape = _first_shape(op, graph)
    return len(shape) >= 3 and groups == shape[1]


def graph_structure(graph: OpGraph, costs: Sequence[OpCost]) -> GraphStructure:
    """Group ops into nodes, then merge nodes that two message-passing layers cannot tell apart."""
    num_ops = len(graph.ops)
    node_of_op = np.full(num_ops, -1, np.int64)
    component_of_op = np.zeros(num_ops, np.int64)
    heads: list[int] = []  # op position that gives the node its kind and shape
    node_of_head: dict[int, int] = {}

    def node_for(head: int) -> int:
        node = node_of_head.get(head)
        if node is None:
            node = node_of_head[head] = len(heads)
            heads.append(head)
        return node

    for op_idx, (op, cost) in enumerate(zip(graph.ops, costs, strict=True)):
        component_of_op[op_idx] = _COMPONENT_IDX[op.component]
        if cost.state is CostState.FREE and not cost.flops and not cost.bytes_moved:
            continue
        head = op_idx
        while op.component is not Component.FORWARD and op.forward_op_idx is not None and op.forward_op_idx != head:
            # the backward of a cast belongs to the op that the cast feeds
            head = op.forward_op_idx
            op = graph.ops[head]
        node_of_op[op_idx] = node_for(head)

    num_nodes = len(heads)
    counted = node_of_op >= 0
    slot = (node_of_op * NUM_COMPONENTS + component_of_op)[counted]
    unit_idx = np.full((num_nodes, NUM_COMPONENTS), -1, np.int64)
    tensor_cores = np.zeros((num_nodes, NUM_COMPONENTS), bool)
    is_depthwise = [_is_depthwise(graph.ops[head], graph) for head in heads]
    work = np.zeros((5, int(counted.sum())))  # flops, bytes, unfused bytes, launches, time proxy of each counted op
    for position, op_idx in enumerate(np.flatnonzero(counted)):
        op, cost = graph.ops[op_idx], costs[op_idx]
        node, column = node_of_op[op_idx], component_of_op[op_idx]
        num_bytes, repeats = cost.bytes_moved, op.repeats
        extra = unfused_attention_bytes(op, graph) if op.kind == "sdpa" else num_bytes
        # the proxy only splits a node's component among its few ops (two casts, say)
        proxy = cost.flops * 0.02 + num_bytes + 1.0
        work[:, position] = (
            cost.flops * repeats, num_bytes * repeats, extra * repeats, cost.num_launches * repeats, proxy,
        )  # fmt: skip
        if unit_idx[node, column] < 0 or not tensor_cores[node, column]:  # a product outranks its bias reduction
            unit_idx[node, column], tensor_cores[node, column] = _unit_of(op, is_depthwise=is_depthwise[node])
    totals = np.stack([np.bincount(slot, row, minlength=num_nodes * NUM_COMPONENTS) for row in work])
    flops, bytes_moved, unfused, launches = totals[:4].reshape(4, num_nodes, NUM_COMPONENTS)
    op_weight = np.zeros(num_ops)
    op_weight[counted] = work[4] / totals[4][slot]

    in_neighbours, out_neighbours = _node_neighbours(graph, heads, node_of_head)
    raw = np.array([_raw_row(graph.ops[head], graph) for head in heads], np.float64).reshape(num_nodes, len(_RAW_NAMES))
    raw[:, _RAW_IDX["needs_input_gradient"]] = flops[:, 1] + bytes_moved[:, 1] > 0
    kind_idx = np.array([KIND_IDX.get(graph.ops[head].kind, NUM_KINDS - 1) for head in heads], np.int64)
    category_idx = np.array([_CATEGORY_IDX[category_of(graph.ops[head].kind)] for head in heads], np.int64)

    signature = np.concatenate(
        [kind_idx[:, None].astype(np.float64), flops, bytes_moved, unfused, launches, unit_idx, raw], axis=1
    )
    colours = _merge_colours(signature, in_neighbours, out_neighbours)
    num_merged = int(colours.max()) + 1 if num_nodes else 0
    count = np.bincount(colours, minlength=num_merged).astype(np.float64)
    representative = np.zeros(num_merged, np.int64)
    representative[colours[::-1]] = np.arange(num_nodes)[::-1]  # the first node of each colour

    def merged_edges(neighbours: list[list[int]]) -> np.ndarray:
        pairs = [(colours[u], c) for c, node in enumerate(representative) for u in neighbours[node]]
        return np.array(pairs, np.int64).reshape(-1, 2).T.copy()

    merged_of_op = np.where(counted, colours[np.maximum(node_of_op, 0)], -1) if num_nodes else node_of_op
    input_bytes = sum(graph.tensors[t].num_bytes for t in graph.inputs)
    pick = representative
    return GraphStructure(
        kind_idx=kind_idx[pick], category_idx=category_idx[pick], count=count, flops=flops[pick],
        unit_idx=unit_idx[pick], on_tensor_cores=tensor_cores[pick], bytes_moved=bytes_moved[pick],
        unfused_bytes=unfused[pick], launches=launches[pick], raw=raw[pick], in_edges=merged_edges(in_neighbours),
        out_edges=merged_edges(out_neighbours), op_node_idx=merged_of_op, op_component_idx=component_of_op,
        op_weight=op_weight, input_bytes=float(input_bytes), batch_size=graph.batch_size or 1,
    )  # fmt: skip


def _node_neighbours(
    graph: OpGraph, heads: list[int], node_of_head: dict[int, int]
) -> tuple[list[list[int]], list[list[int]]]:
    """Per node the nodes it reads from and the nodes that read it, looking through free ops and casts."""
    sources_of_tensor: dict[int, tuple[int, ...]] = {}
    in_neighbours: list[list[int]] = [[] for _ in heads]
    out_neighbours: list[list[int]] = [[] for _ in heads]
    for op_idx, op in enumerate(graph.ops):
        if op.phase != "forward":
            continue
        sources = tuple(dict.fromkeys(s for t in op.inputs for s in sources_of_tensor.get(t, ())))
        node = node_of_head.get(op_idx)
        if node is None:  # a view or a cast: its readers see through it
            for tensor_idx in op.outputs:
                sources_of_tensor[tensor_idx] = sources[:8]
            continue
        for source in sources:
            in_neighbours[node].append(source)
            out_neighbours[source].append(node)
        for tensor_idx in op.outputs:
            sources_of_tensor[tensor_idx] = (node,)
    return in_neighbours, out_neighbours


def _merge_colours(
    signature: np.ndarray, in_neighbours: list[list[int]], out_neighbours: list[list[int]]
) -> np.ndarray:
    """Weisfeiler-Lehman colours after two rounds in both directions, (N,) int64 from 0."""
    num_nodes = len(signature)
    table: dict = {}
    rows = np.ascontiguousarray(signature)
    colours = [table.setdefault(rows[i].tobytes(), len(table)) for i in range(num_nodes)]
    for _ in range(2):
        table = {}
        colours = [
            table.setdefault(
                (
                    colours[i],
                    tuple(sorted(colours[u] for u in in_neighbours[i])),
                    tuple(sorted(colours[v] for v in out_neighbours[i])),
                ),
                len(table),
            )
            for i in range(num_nodes)
        ]
    return np.array(colours, np.int64)


# ---------------------------------------------------------------------------------------------
# device and job

# Layout and type change convolutions by class: channels_last helps dense ones and makes grouped ones several
# times slower under autocast (no cuDNN kernel for their backward).
_CONV_CLASSES = ("dense", "grouped", "depthwise")
_CONV_CROSSES = (*(f"nhwc_{c}_conv" for c in _CONV_CLASSES), *(f"half_{c}_conv" for c in _CONV_CLASSES))

NODE_FEATURE_NAMES: tuple[str, ...] = (
    # casts, gradient sums and updates are left out: they say nothing about the op itself, and networks that have many
    # of them (DenseNet, BERT) would land outside everything seen
    *(f"log_physics_us_{c}" for c in COMPONENTS[:3]),
    *(f"log_flop_to_byte_time_{c}" for c in COMPONENTS[:3]),
    "log_flops", "log_bytes", "log_launches", "log_total_physics_us", "log_waves", "wave_efficiency",
    "small_tile_wave_efficiency", "log_flop_per_sm_cycle", "log_peak_per_watt", "log_bytes_to_l2",
    *(f"log_{name}" for name in _LOG_RAW), *_PLAIN_RAW, *_CONV_CROSSES, "slow_grouped_conv",
    *(f"category_{c}" for c in CATEGORIES), *(f"compute_{d}" for d in COMPUTE_DTYPES),
)  # fmt: skip

# Device specification features come first: training hides them at random, and prediction hides them
# for a device that the checkpoint has not seen (see training/model.py).
SPEC_FEATURE_NAMES: tuple[str, ...] = (
    "log_fp64_tflops", "log_fp32_tflops", "log_tf32_tflops", "log_half_tflops", "log_mem_bandwidth", "log_num_sms",
    "log_boost_clock", "log_l2_mb", "compute_capability", "year",
)  # fmt: skip
# "kernel" marks rows that time one kernel without a framework around it
_FRAMEWORKS = ("pytorch", "tensorflow", "mxnet", "paddle", "torch7", "kernel")
GLOBAL_FEATURE_NAMES: tuple[str, ...] = (
    *SPEC_FEATURE_NAMES,
    "is_amd", "has_tensor_cores", "log_half_to_fp32_peak", "log_fp32_ridge",
    *(f"precision_{p}" for p in Precision), "all_half", "tf32_matmul", "nhwc", "torch_compile", "xla",
    *(f"framework_{f}" for f in _FRAMEWORKS), "pytorch_version", "tensorflow_version", "fused_attention",
    *(f"phase_{p}" for p in Phase), "host_copy", "data_loader", "input_gradient",
    "host_windows", "host_wsl",
    "log_batch", "log_launches", "log_physics_ms", "log_host_to_gpu",
)  # fmt: skip


@dataclass(frozen=True)
class GraphArrays:
    """Input of the checkpoint for one graph and job. N nodes, C components, E edges."""

    node_features: np.ndarray  # (N, len(NODE_FEATURE_NAMES)) float32, not standardised
    kind_idx: np.ndarray  # (N,) int64
    physics_ms: np.ndarray  # (N, C) float32, roofline time with launch floor; 0 where the component is absent
    count: np.ndarray  # (N,) float32
    in_edges: np.ndarray  # (2, E) int64
    out_edges: np.ndarray  # (2, E') int64
    globals: np.ndarray  # (len(GLOBAL_FEATURE_NAMES),) float32
    host_launches: float  # kernels that the host launches per step
    host_copy_ms: float  # physics of the input copy; 0 without one


def has_fused_attention(job: JobSpec) -> bool:
    """Whether scaled-dot-product attention runs as one kernel: what the job says, else PyTorch from 2.0 on."""
    if job.attention != "auto":
        return job.attention == "fused"
    version = framework_version_number(job.framework_version)
    return job.framework == "kernel" or (job.framework == "pytorch" and (version >= 2 or version == 0))


def _unit_peaks(device: DeviceSpec) -> np.ndarray:
    """(2, len(COMPUTE_DTYPES)) flop/us without and with tensor cores."""
    plain = np.array([device.fp64_tflops or device.fp32_tflops / 32, *[device.fp32_tflops] * 5])
    tensor = np.array([device.peak_tflops(dtype) or device.fp32_tflops for dtype in COMPUTE_DTYPES])
    # products on the plain cores draw the most power; elementwise arithmetic rarely bounds anything
    tensor[_DTYPE_IDX[DType.FP32]] *= sustained_share(device)
    on_units = tensor > 1.5 * device.fp32_tflops
    on_units[: _DTYPE_IDX[DType.TF32]] = False
    tensor[on_units] *= tensor_share(device)
    return np.stack([plain, tensor]) * 1e6  # 1 TFLOP/s = 1e6 flop/us


def sustained_share(device: DeviceSpec) -> float:
    """Share of the plain fp32 peak that the board's power sustains, in (0, 1]."""
    if not device.tdp_w:
        return 1.0
    per_watt = FP32_TFLOPS_PER_WATT_2018 * np.exp(_FP32_PER_WATT_GROWTH * (device.year - 2018))
    asked = device.fp32_tflops / device.tdp_w / per_watt
    return float(max(asked, 1.0) ** -_CLOCK_OF_POWER)


def tensor_share(device: DeviceSpec) -> float:
    """Share of the tensor peaks that large products reach; 1 where no data or no NVIDIA unit says otherwise."""
    half = device.fp16_tensor_tflops
    if not half or device.compute_capability is None or half < 1.5 * device.fp32_tflops:
        return 1.0
    per_cycle = half * 1e6 / (device.num_sms * device.boost_clock_mhz)
    return 1.0 if per_cycle < _HALVED_FLOP_PER_SM_CYCLE else FULL_TENSOR_EFFICIENCY


def _attention_share(structure: GraphStructure, *, fused: bool) -> np.ndarray:
    """(N,) flops of a fused attention kernel over those counted: half under a causal mask, heads padded to tiles."""
    raw = structure.raw
    is_attention = (structure.category_idx == _CATEGORY_IDX[Category.ATTENTION]) & fused
    head_dim = np.maximum(raw[:, _RAW_IDX["k"]], 1)
    padded = np.ceil(head_dim / _HEAD_DIM_TILE) * _HEAD_DIM_TILE / head_dim
    causal = np.where(raw[:, _RAW_IDX["is_causal"]] > 0, 0.5 + 64 / np.maximum(raw[:, _RAW_IDX["n"]], 128), 1.0)
    return np.where(is_attention, padded * causal, 1.0)


def encode(structure: GraphStructure, job: JobSpec, *, input_gradient: bool = False) -> GraphArrays:
    """Add device and job to a structure; pure numpy, a fraction of a millisecond per graph."""
    device = job.device
    peaks = _unit_peaks(device)
    fused = has_fused_attention(job)
    bytes_moved = structure.bytes_moved if fused else structure.unfused_bytes
    peak = np.where(structure.unit_idx >= 0, peaks[structure.on_tensor_cores.astype(int), structure.unit_idx], 1.0)
    flop_us = structure.flops * _attention_share(structure, fused=fused)[:, None] / peak
    flop_us = flop_us / np.where(_is_winograd(structure)[:, None], WINOGRAD_GAIN, 1.0)
    byte_us = bytes_moved / (device.mem_bandwidth_gb_s * 1e3)  # 1 GB/s = 1e3 bytes/us
    is_slow_grouped = _is_slow_grouped(structure, job)
    taps = structure.raw[:, _RAW_IDX["out_elements"]] * structure.raw[:, _RAW_IDX["kernel_area"]]
    slow_us = is_slow_grouped * taps * SLOW_GROUPED_FLOPS_PER_TAP / (device.fp32_tflops * 1e6)
    num_backward = np.maximum((structure.launches[:, _BACKWARD_COMPONENTS] > 0).sum(1), 1)
    for column in _BACKWARD_COMPONENTS:
        flop_us[:, column] = np.maximum(flop_us[:, column], slow_us / num_backward)
    present = structure.launches > 0
    physics_us = np.where(present, np.maximum(flop_us, byte_us) + KERNEL_FLOOR_US * structure.launches, 0.0)

    raw = structure.raw
    m, n, batch_count = (raw[:, _RAW_IDX[name]] for name in ("m", "n", "batch_count"))
    small_tiles = np.ceil(m / 64) * np.ceil(n / 64) * np.maximum(batch_count, 1)
    tiles = np.ceil(m / 128) * np.ceil(n / 128) * np.maximum(batch_count, 1)
    waves = tiles / max(device.num_sms, 1)
    wave_efficiency = np.where(tiles > 0, waves / np.maximum(np.ceil(waves), 1), 1.0)
    small_waves = small_tiles / max(device.num_sms, 1)
    small_wave_efficiency = np.where(tiles > 0, small_waves / np.maximum(np.ceil(small_waves), 1), 1.0)
    is_product = (structure.flops.sum(1) > 0) & (tiles > 0)
    main_peak = peak[:, 0] / 1e6  # TFLOP/s
    flop_per_sm_cycle = main_peak * 1e6 / (max(device.num_sms, 1) * max(device.boost_clock_mhz, 300))
    # a board of unknown power counts as one of 250 W
    peak_per_watt = main_peak / (device.tdp_w or 250.0)
    total_us = physics_us.sum(1)
    main_unit = np.where(structure.unit_idx[:, 0] >= 0, structure.unit_idx[:, 0], structure.unit_idx.max(1))
    num_nodes = len(raw)
    category = np.zeros((num_nodes, len(CATEGORIES)))
    category[np.arange(num_nodes), structure.category_idx] = 1
    compute = np.zeros((num_nodes, len(COMPUTE_DTYPES)))
    compute[np.arange(num_nodes), np.maximum(main_unit, 0)] = 1
    l2_bytes = max(device.l2_mb, 0.5) * 1e6
    node_features = np.concatenate(
        [
            np.log(physics_us[:, :3] + 1e-2),
            np.log((flop_us[:, :3] + 1e-3) / (byte_us[:, :3] + 1e-3)),
            np.log(structure.flops.sum(1) + 1)[:, None],
            np.log(bytes_moved.sum(1) + 1)[:, None],
            np.log(structure.launches.sum(1) + 1)[:, None],
            np.log(total_us + 1e-2)[:, None],
            np.log(waves + 0.1)[:, None],
            wave_efficiency[:, None],
            small_wave_efficiency[:, None],
            np.where(is_product, np.log(np.maximum(flop_per_sm_cycle, 1e-3)), np.log(128.0))[:, None],
            np.where(is_product, np.log(np.maximum(peak_per_watt, 1e-4)), np.log(0.1))[:, None],
            np.log((bytes_moved[:, 0] + 1) / l2_bytes)[:, None],
            np.log(raw[:, [_RAW_IDX[name] for name in _LOG_RAW]] + 1),
            raw[:, [_RAW_IDX[name] for name in _PLAIN_RAW]],
            _conv_crosses(structure, job),
            is_slow_grouped[:, None],
            category,
            compute,
        ],
        axis=1,
    ).astype(np.float32)
    host_launches = float((structure.launches.sum(1) * structure.count).sum())
    physics_ms_total = float((total_us * structure.count).sum()) / 1e3
    return GraphArrays(
        node_features=node_features,
        kind_idx=structure.kind_idx,
        physics_ms=(physics_us / 1e3).astype(np.float32),
        count=structure.count.astype(np.float32),
        in_edges=structure.in_edges,
        out_edges=structure.out_edges,
        globals=_globals(
            structure,
            job,
            input_gradient=input_gradient,
            fused=fused,
            host_launches=host_launches,
            physics_ms=physics_ms_total,
        ),
        host_launches=host_launches,
        host_copy_ms=structure.input_bytes / (HOST_COPY_GB_S * 1e6) if job.host_copy else 0.0,
    )


def is_channels_last(job: JobSpec) -> bool:
    """Whether convolutions run in NHWC by the user's choice; other frameworks choose the layout themselves."""
    return job.memory_format == "nhwc" and job.framework == "pytorch"


_BACKWARD_COMPONENTS = (_COMPONENT_IDX[Component.INPUT_GRADIENT], _COMPONENT_IDX[Component.WEIGHT_GRADIENT])


def _is_winograd(structure: GraphStructure) -> np.ndarray:
    """(N,) bool: dense fp32 convolutions that the libraries run with Winograd's algorithm."""
    raw = structure.raw
    return (
        (structure.category_idx == _CATEGORY_IDX[Category.CONV])
        & (structure.unit_idx[:, 0] == _DTYPE_IDX[DType.FP32])
        & np.isin(raw[:, _RAW_IDX["kernel_area"]], (9, 25))
        & (raw[:, _RAW_IDX["stride"]] == 1)
        & (raw[:, _RAW_IDX["groups"]] == 1)
    )


def _is_slow_grouped(structure: GraphStructure, job: JobSpec) -> np.ndarray:
    """(N,) bool: grouped NHWC half convolutions whose backward has no fast cuDNN kernel."""
    raw = structure.raw
    groups, width = raw[:, _RAW_IDX["groups"]], raw[:, _RAW_IDX["channels_per_group"]]
    if 0 < framework_version_number(job.framework_version) < _CUDNN_8_3_PYTORCH - 1e-6:
        is_fast = (width <= 16) & (groups % 8 == 0)
    else:
        is_fast = (width <= 32) & (groups >= 8)
    return (
        (structure.category_idx == _CATEGORY_IDX[Category.CONV])
        & (groups > 1)
        & (raw[:, _RAW_IDX["is_depthwise"]] == 0)
        & (raw[:, _RAW_IDX["in_bytes_per_element"]] == 2)
        & ~is_fast
        & is_channels_last(job)
    )


def _conv_crosses(structure: GraphStructure, job: JobSpec) -> np.ndarray:
    """(N, 6) float: convolution class where the layout is NHWC, and where the op runs in a half type."""
    is_conv = structure.category_idx == _CATEGORY_IDX[Category.CONV]
    is_depthwise = structure.raw[:, _RAW_IDX["is_depthwise"]] > 0
    is_grouped = (structure.raw[:, _RAW_IDX["groups"]] > 1) & ~is_depthwise
    classes = np.stack([is_conv & ~is_grouped & ~is_depthwise, is_conv & is_grouped, is_conv & is_depthwise], axis=1)
    # storage width tells half for depthwise convolutions too, whose flops run on the fp32 units
    is_half = structure.raw[:, _RAW_IDX["in_bytes_per_element"]] == 2
    return np.concatenate([classes & is_channels_last(job), classes & is_half[:, None]], axis=1).astype(float)


# The bf16 precisions run the kernels and casts of their fp16 twins, which most rows are of.
_ALSO_COUNTS_AS = {Precision.BF16: Precision.FP16, Precision.MIXED_BF16: Precision.MIXED}


def _globals(
    structure: GraphStructure,
    job: JobSpec,
    *,
    input_gradient: bool,
    fused: bool,
    host_launches: float,
    physics_ms: float,
) -> np.ndarray:
    device = job.device
    half = device.peak_tflops(DType.FP16) or device.fp32_tflops
    tf32 = device.tf32_tflops or device.fp32_tflops
    version = framework_version_number(job.framework_version)
    is_amd = device.compute_capability is None
    values = [
        np.log(device.fp64_tflops or device.fp32_tflops / 32), np.log(device.fp32_tflops), np.log(tf32), np.log(half),
        np.log(device.mem_bandwidth_gb_s), np.log(max(device.num_sms, 1)), np.log(max(device.boost_clock_mhz, 300)),
        np.log(max(device.l2_mb, 0.25)), device.compute_capability or 0.0, device.year - 2018,
        float(is_amd), float(half > 1.5 * device.fp32_tflops), np.log(half / device.fp32_tflops),
        np.log(device.fp32_tflops * 1e3 / device.mem_bandwidth_gb_s),
        *(float(job.precision is p or _ALSO_COUNTS_AS.get(job.precision) is p) for p in Precision),
        float(job.activation_rule is ActivationRule.ALL_HALF), float(job.tf32_matmul),
        float(is_channels_last(job)),
        float(job.compiler == "torch_compile"), float(job.compiler == "xla"),
        *(float(job.framework == f) for f in _FRAMEWORKS),
        version if job.framework == "pytorch" else 0.0, version if job.framework == "tensorflow" else 0.0, float(fused),
        *(float(job.phase is p) for p in Phase),
        float(job.host_copy), float(job.data_loader), float(input_gradient),
        float(job.host_os == "windows"), float(job.host_os == "wsl"),
        np.log(max(structure.batch_size, 1)), np.log(host_launches + 1), np.log(physics_ms + 1e-3),
        np.log((host_launches * 5e-3 + 1e-3) / (physics_ms + 1e-3)),
    ]  # fmt: skip
    return np.array(values, np.float32)
