"""Measured runs on several GPUs beside the run of the same work on one: what communication adds, from the corpus alone.

A pair is one configuration (medians over repeats): model, framework and version, GPU, precision, batch per GPU,
input, optimizer, accumulation, software, GPUs, nodes and links, beside the same configuration on one GPU out of the
same table or site. Everything is read from ``datasets/``; no network is involved.
"""

import logging
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from gnnpred.communication.fabrics import ClusterFabric, resolve_fabric
from gnnpred.communication_fit.gradient_profile import GradientProfile
from gnnpred.corpus.store import MeasurementRow
from gnnpred.errors import GnnpredError
from gnnpred.job import ActivationRule, Phase, Precision

logger = logging.getLogger(__name__)

FULL_PRECISIONS = (Precision.FP32, Precision.TF32)
# Steps of varying length (steps per epoch or tokens differ with the GPU count): their difference is not overhead.
UNUSABLE_FAMILIES = frozenset({"tacotron", "waveglow", "neumf"})
# Lambda's Transformer-XL rows add 1 to 3 ms on eight PCIe cards, where its 770 MB of gradients alone take over 50.
UNUSABLE_OF_LAMBDA = frozenset({"transformer_xl"})
# Batches of varying shape and host-bound input make their multi-GPU overhead; scored apart, not fitted.
IRREGULAR_FAMILIES = frozenset({"rcnn", "lstm", "speech"})
IRREGULAR_MODELS = ("maskrcnn", "efficientdet", "gnmt", "mask_rcnn")
# Lambda's v1 runs on SXM hosts (PyTorch 1.13, virtual machines) reach 1 to 13 GB/s between GPUs that the v0 and v2
# runs join at NVLink rate: the links were not visible to the guest.
_BLIND_HOSTS, _BLIND_GPUS = "lambda-pt-v1-", ("A100-SXM4", "V100-SXM2")
_FIXED_GLOBAL_BATCH = ("wide-and-deep", "dlrm", "sim", "ncf", "vae", "fastpitch", "unet2d-industrial")


@dataclass(frozen=True, kw_only=True)
class Pair:
    """One multi-GPU configuration beside its single-GPU run."""

    site: str  # who measured: lambda-pt, dle-tensorflow, sia ...
    group: str  # software family: torch-ddp, tensorflow, mxnet ...
    family: str  # of the model; what cross-validation holds out
    row: MeasurementRow  # one of the rows on several GPUs
    single: MeasurementRow  # one of the rows on one GPU
    single_ms: float
    multi_ms: float
    repeats: int
    profile: GradientProfile
    gradient_width: float  # bytes of an element on the wire
    fabric: ClusterFabric

    @property
    def is_full(self) -> bool:
        return self.row.precision in FULL_PRECISIONS

    @property
    def measured_efficiency(self) -> float:
        return self.single_ms / self.multi_ms


def site_of(row: MeasurementRow) -> str:
    """Who measured the row, on which kind of hosts."""
    parts = row.source_id.split("-")
    return parts[0] if parts[0] in ("sia", "gavel", "elasticflow") else "-".join(parts[:2])


def software_group(row: MeasurementRow) -> str:
    """Families of software that communicate alike. TensorFlow runs Horovod, but in Lambda's suite
    (tf_cnn_benchmarks) replicated variables."""
    if row.framework == "pytorch":
        return "torch-ddp"
    if row.framework.startswith("tensorflow"):
        return "tf-replicated" if row.source_id.startswith("lambda") else "horovod"
    return row.framework


def _key(row: MeasurementRow) -> tuple:
    if row.source_id.startswith("lambda-pt"):  # one host per source: a version of the suite is what a pair shares
        origin = row.source_id.rsplit("-", 1)[0]
    elif row.source_id.startswith("lambda-tf"):
        origin = row.source_id.removesuffix("_XLA")
    else:
        origin = row.source_id if row.source_id.startswith("sia") else row.source
    return (
        origin, row.graph_id, row.model, row.framework, row.framework_version, row.device, row.precision,
        row.activation_rule, row.batch_size, row.input, row.optimizer, row.grad_accum, row.memory_format, row.compiler,
        row.data_loader, row.attention, row.checkpointing,
    )  # fmt: skip


def is_usable(row: MeasurementRow) -> bool:
    """A training step, rebuilt, without a known defect."""
    return (
        row.phase is Phase.TRAIN
        and bool(row.graph_id)
        and row.step_time_ms > 0
        and row.strategy in ("", "ddp")
        and not (row.superseded or row.suspect or row.unstable or row.few_iterations)
        and row.family not in UNUSABLE_FAMILIES
        and not (row.source_id.startswith("lambda-pt") and row.family in UNUSABLE_OF_LAMBDA)
        and not (row.source_id.startswith(_BLIND_HOSTS) and row.device.startswith(_BLIND_GPUS))
        and not row.model.lower().startswith(_FIXED_GLOBAL_BATCH)
        and "estimated" not in row.note
        and "unevenly" not in row.note
    )


def is_irregular(pair: Pair) -> bool:
    """Whether the step's length varies from batch to batch or hangs on the host, by what the sources themselves say.

    DLPerf calls its native PyTorch loader, Paddle's and MXNet's ResNet in mixed precision bound by input.
    """
    row = pair.row
    input_bound = pair.family == "resnet" and (
        row.source_id.startswith("dlperf-pytorch")
        or (not pair.is_full and row.source_id.startswith("dlperf-") and row.framework in ("paddle", "mxnet"))
    )
    return input_bound or pair.family in IRREGULAR_FAMILIES or row.model.lower().startswith(IRREGULAR_MODELS)


def thin(pairs: Sequence[Pair]) -> list[Pair]:
    """One pair per model, GPU, precision, GPUs, nodes and doubling of the batch for Sia's grids (20,000 rows of six
    models): the one of median efficiency. Its YOLOv3 and DeepSpeech 2 hang on the host and are left out."""
    kept = [pair for pair in pairs if pair.site != "sia"]
    groups: dict[tuple, list[Pair]] = defaultdict(list)
    for pair in pairs:
        if pair.site == "sia" and pair.family in ("resnet", "bert"):
            row = pair.row
            key = (row.model, row.device, row.precision, row.gpus, row.nodes, row.interconnect)
            groups[(*key, round(float(np.log2(row.batch_size))))].append(pair)
    for group in groups.values():
        ordered = sorted(group, key=lambda pair: (pair.measured_efficiency, pair.row.row_id))
        kept.append(ordered[(len(ordered) - 1) // 2])
    return kept


def fabric_of(row: MeasurementRow) -> ClusterFabric:
    """The links that the row's source names, or the usual ones of its GPU."""
    return resolve_fabric(device=row.spec, gpus=row.gpus, nodes=row.nodes, **row.fabric_names())


def gradient_width(row: MeasurementRow) -> float:
    """Bytes of a gradient element on the wire, as :func:`gnnpred.communication.timeline` decides it for a job."""
    if row.precision in (Precision.FP16, Precision.BF16):
        return 2.0
    if row.precision not in (Precision.MIXED, Precision.MIXED_BF16):
        return 4.0
    halved = row.framework == "pytorch" and row.activation_rule is ActivationRule.ALL_HALF
    return 2.0 if halved or row.framework == "mxnet" else 4.0


def match_rows(
    multi: Sequence[MeasurementRow], single: Sequence[MeasurementRow]
) -> list[tuple[list[MeasurementRow], list[MeasurementRow]]]:
    """Repeats of a configuration on several GPUs beside those of its single-GPU run."""
    singles: dict[tuple, list[MeasurementRow]] = defaultdict(list)
    for row in single:
        if row.gpus == 1 and is_usable(row) and not row.derived_from:
            singles[_key(row)].append(row)
    groups: dict[tuple, list[MeasurementRow]] = defaultdict(list)
    for row in multi:
        key = _key(row)
        if is_usable(row) and key in singles:
            groups[(*key, row.gpus, row.nodes, row.interconnect)].append(row)
    return [(group, singles[key[:-3]]) for key, group in groups.items()]


def _representative(rows: Sequence[MeasurementRow]) -> MeasurementRow:
    """The row of median time, of those that networks train on where there are any."""
    rows = [row for row in rows if row.used_for_training] or list(rows)
    return sorted(rows, key=lambda row: (row.step_time_ms, row.row_id))[(len(rows) - 1) // 2]


def make_pairs(
    matched: Sequence[tuple[list[MeasurementRow], list[MeasurementRow]]], profiles: Mapping[str, GradientProfile]
) -> list[Pair]:
    """Pairs of matched rows; configurations whose links no table knows are left out."""
    pairs = []
    for group, singles in matched:
        group = sorted(group, key=lambda row: (row.step_time_ms, row.row_id))
        row = group[(len(group) - 1) // 2]
        try:
            fabric = fabric_of(row)
        except GnnpredError as error:
            logger.info("left out %s: %s", row.source_id, error)
            continue
        pairs.append(
            Pair(
                site=site_of(row),
                group=software_group(row),
                family=row.family,
                row=row,
                single=_representative(singles),
                single_ms=float(np.median([r.step_time_ms for r in singles])),
                multi_ms=float(np.median([r.step_time_ms for r in group])),
                repeats=len(group),
                profile=profiles[row.graph_id],
                gradient_width=gradient_width(row),
                fabric=fabric,
            )
        )
    return pairs
