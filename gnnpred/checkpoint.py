"""Shipped and user-made checkpoints: find, verify, load, run through onnxruntime.

A checkpoint is a folder of ``model.onnx`` (weights and network), ``trees.onnx`` (boosted trees, where the card gives
them a weight), ``card.json`` (what it was trained on, its
feature schema, its error intervals) and ``golden.json`` (an example input with its expected answer, run again at
every load); after ``gnnpred calibrate`` also ``calibration.json`` (measured runs of the user's own machine, which
correct the answer). Nothing in it is a pickle.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from gnnpred.calibration import CALIBRATION_FILE, Calibration, CalibrationRun, Correction
from gnnpred.costs import OpCost
from gnnpred.errors import GnnpredError, UsageError
from gnnpred.features import (
    FEATURE_SCHEMA_VERSION,
    GLOBAL_FEATURE_NAMES,
    NODE_FEATURE_NAMES,
    GraphArrays,
    GraphStructure,
    encode,
    graph_structure,
)
from gnnpred.graph import OpGraph, OpPhase
from gnnpred.graph_summary import SUMMARY_FEATURE_NAMES, roofline_ms, summarise_graphs
from gnnpred.intervals import KNOWN_DEVICE, UNSEEN_DEVICE, IntervalModel, interval_features, interval_models
from gnnpred.job import JobSpec
from gnnpred.known_devices import KnownDevices, Novelty, device_warnings
from gnnpred.op_kinds import OP_KINDS

DEFAULT_CHECKPOINT = "base"
GOLDEN_TOLERANCE = 1e-3  # relative; other processors round float32 differently
_MAX_CARD_BYTES = 16 * 2**20
_MAX_MODEL_BYTES = 256 * 2**20


@dataclass(frozen=True)
class ComputeTimes:
    """Predicted compute of one step on one GPU."""

    op_ms: np.ndarray  # (num_ops,) float64, sums to compute_ms
    compute_ms: float
    interval_factors: tuple[float, float]  # 90 %: step time is between these multiples of the prediction
    warnings: tuple[str, ...]
    traits: CalibrationRun | None = None  # what a calibration reads of this prediction
    correction: Correction | None = None  # by a calibration; it is in the times and the interval already


@dataclass(frozen=True)
class CheckpointCard:
    """What a checkpoint says about itself (card.json)."""

    name: str
    feature_schema: int
    node_features: tuple[str, ...]
    global_features: tuple[str, ...]
    op_kinds: tuple[str, ...]
    model_sha256: str
    trees_sha256: str  # "" without trees
    tree_weight: float  # share of the trees in the geometric mean of the step time
    calibration_sha256: str  # "" without calibration
    devices: tuple[str, ...]  # seen in training: their specification may be used by the network
    known_devices: KnownDevices  # whole-step training rows by GPU
    default_framework_version: str
    known_kinds: tuple[str, ...]
    global_ranges: dict[str, tuple[float, float]]  # what training covered, by global feature
    intervals: dict[str, IntervalModel]  # for GPUs that training has seen and for those that it has not
    has_calibrated_intervals: bool
    raw: dict[str, Any]

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> "CheckpointCard":
        where = f"card of checkpoint {content['name']!r}"
        return cls(
            name=content["name"],
            feature_schema=content["feature_schema"],
            node_features=tuple(content["node_features"]),
            global_features=tuple(content["global_features"]),
            op_kinds=tuple(content["op_kinds"]),
            model_sha256=content["model_sha256"],
            trees_sha256=content.get("trees_sha256", ""),
            tree_weight=content.get("tree_weight", 0.0),
            calibration_sha256=content.get("calibration_sha256", ""),
            devices=tuple(content["devices"]),
            known_devices=KnownDevices.from_json(
                content.get("device_rows", {}), own_devices=content.get("own_devices", ()), where=where
            ),
            default_framework_version=content["default_framework_version"],
            known_kinds=tuple(content["known_kinds"]),
            global_ranges={k: tuple(v) for k, v in content["global_ranges"].items()},
            intervals=interval_models(content.get("intervals", {}), where=where),
            has_calibrated_intervals=content.get("has_calibrated_intervals", True),
            raw=content,
        )


def shipped_checkpoints() -> Path:
    """Folder of the checkpoints that come with the package (the wheel's copy, else the clone's)."""
    package = Path(__file__).parent
    for folder in (package / "_shipped", package.parent / "checkpoints"):
        if folder.is_dir():
            return folder
    raise GnnpredError("no shipped checkpoints found: reinstall gnnpred")


def find_checkpoint(name_or_path: str | Path | None = None) -> Path:
    """Folder of a checkpoint by shipped name or by path; raises UsageError naming what there is."""
    wanted = str(name_or_path or DEFAULT_CHECKPOINT)
    shipped = shipped_checkpoints()
    if "/" not in wanted and (shipped / wanted / "card.json").is_file():
        return shipped / wanted
    if (Path(wanted) / "card.json").is_file():
        return Path(wanted)
    names = ", ".join(sorted(p.parent.name for p in shipped.glob("*/card.json"))) or "none"
    raise UsageError(f"checkpoint {wanted!r} not found: give a folder with a card.json or a shipped name ({names})")


def load_checkpoint(name_or_path: str | Path | None = None) -> "Checkpoint":
    """Load and verify a checkpoint: schema, hash, golden example."""
    folder = find_checkpoint(name_or_path)
    card = CheckpointCard.from_json(_read_json(folder / "card.json"))
    if (
        card.feature_schema != FEATURE_SCHEMA_VERSION
        or card.node_features != NODE_FEATURE_NAMES
        or card.global_features != GLOBAL_FEATURE_NAMES
        or card.op_kinds != tuple(OP_KINDS)
        or (card.trees_sha256 and card.raw.get("summary_features") != list(SUMMARY_FEATURE_NAMES))
    ):
        raise GnnpredError(
            f"checkpoint {folder.name!r} was made with another feature schema than this gnnpred: "
            "retrain it with `gnnpred train` or use a checkpoint of this version"
        )
    model_bytes = _read_verified(folder / "model.onnx", card.model_sha256)
    trees_bytes = _read_verified(folder / "trees.onnx", card.trees_sha256) if card.trees_sha256 else b""
    calibration = None
    if card.calibration_sha256:
        path = folder / CALIBRATION_FILE
        content = _parse_json(_read_verified(path, card.calibration_sha256), path)
        calibration = Calibration.from_json(content, where=str(path))
    checkpoint = Checkpoint(card, model_bytes, trees_bytes, calibration)
    _check_golden(checkpoint, _read_json(folder / "golden.json"))
    return checkpoint


def _read_verified(path: Path, sha256: str) -> bytes:
    name = path.parent.name
    try:
        if path.stat().st_size > _MAX_MODEL_BYTES:
            raise GnnpredError(f"checkpoint file {path} is larger than {_MAX_MODEL_BYTES // 2**20} MiB")
        content = path.read_bytes()
    except OSError as error:
        raise GnnpredError(f"checkpoint {name!r} has no readable {path.name}: {error.strerror}") from error
    if hashlib.sha256(content).hexdigest() != sha256:
        raise GnnpredError(f"checkpoint {name!r} is damaged: {path.name} does not match the hash in card.json")
    return content


def _read_json(path: Path) -> dict[str, Any]:
    try:
        if path.stat().st_size > _MAX_CARD_BYTES:
            raise GnnpredError(f"{path} is larger than {_MAX_CARD_BYTES // 2**20} MiB")
        return _parse_json(path.read_bytes(), path)
    except OSError as error:
        raise GnnpredError(f"cannot read {path}: {error.strerror}") from error


def _parse_json(content: bytes, path: Path) -> dict[str, Any]:
    try:
        return json.loads(content)
    except ValueError as error:
        raise GnnpredError(f"{path} is not valid JSON: {error}") from error


class Checkpoint:
    """A loaded checkpoint: holds the onnxruntime sessions."""

    def __init__(
        self,
        card: CheckpointCard,
        model_bytes: bytes,
        trees_bytes: bytes = b"",
        calibration: Calibration | None = None,
    ) -> None:
        self.card = card
        self.calibration = calibration
        self._model_bytes = model_bytes
        self._trees_bytes = trees_bytes

    def without_calibration(self) -> "Checkpoint":
        """The same networks with what training knew alone."""
        if self.calibration is None:
            return self
        return Checkpoint(self.card, self._model_bytes, self._trees_bytes)

    @cached_property
    def _session(self):
        return open_session(self._model_bytes)

    @cached_property
    def _trees_session(self):
        return open_session(self._trees_bytes)

    def run(
        self, arrays: GraphArrays, *, specs_known: bool, summary: np.ndarray | None = None
    ) -> tuple[np.ndarray, float]:
        """Time of each merged node's component, (N, C) float64 in ms, and of the whole step in ms.

        ``summary`` is ``_summary(arrays)`` where the caller has it already.
        """
        op_ms, step_ms, _ = self._run_members(arrays, specs_known=specs_known, summary=summary)
        return op_ms, step_ms

    def _run_members(
        self, arrays: GraphArrays, *, specs_known: bool, summary: np.ndarray | None
    ) -> tuple[np.ndarray, float, float]:
        """:meth:`run`, and log(networks' / trees' time) of the step: 0 without trees."""
        op_ms, step_ms = self._session.run(["op_ms", "step_ms"], network_inputs(arrays, specs_known=specs_known))
        step, log_disagreement = float(step_ms[0]), 0.0
        if self._trees_bytes:
            trees_ms = self._trees_ms(arrays, _summary(arrays) if summary is None else summary)
            log_disagreement = float(np.log(step / trees_ms))
            step = float(blend(step, trees_ms, self.card.tree_weight))
        return op_ms.astype(np.float64), step, log_disagreement

    def _trees_ms(self, arrays: GraphArrays, summary: np.ndarray) -> float:
        """Step time by the trees: they correct the roofline of the whole graph."""
        (log_ratio,) = self._trees_session.run(["log_ratio"], {"features": summary})
        roofline = roofline_ms(arrays.physics_ms, arrays.count, np.zeros(1, np.int64))[0]
        return float(roofline * np.exp(log_ratio[0, 0]))

    def predict(
        self, graph: OpGraph, costs: Sequence[OpCost], job: JobSpec, *, structure: GraphStructure | None = None
    ) -> ComputeTimes:
        """Compute time of one step of a lowered (and, for training, differentiated) graph.

        ``structure`` is ``graph_structure(graph, costs)`` where the caller has it already.
        """
        structure = structure or graph_structure(graph, costs)
        if not len(structure.kind_idx):
            raise GnnpredError(f"{graph.name or 'the graph'} has no op that costs time: nothing to predict")
        arrays = encode(structure, job)
        known = job.device.name in self.card.devices
        summary = _summary(arrays)
        node_ms, compute_ms, log_disagreement = self._run_members(arrays, specs_known=known, summary=summary)
        traits = CalibrationRun.of_summary(
            summary[0],
            device=job.device.name,
            is_known_device=known,
            # measured runs make a GPU that training has not seen a known one
            interval_log=self._interval_log(
                summary, log_disagreement, self._novelty(job) if known else Novelty(), KNOWN_DEVICE
            ),
        )
        correction = self.calibration.correct(traits) if self.calibration else None
        if correction:
            compute_ms *= correction.factor
        counted = structure.op_node_idx >= 0
        op_ms = np.zeros(len(graph.ops))
        op_ms[counted] = (
            node_ms[structure.op_node_idx[counted], structure.op_component_idx[counted]] * structure.op_weight[counted]
        )
        total_ms = op_ms.sum()
        # launch gaps and the input copy belong to no op: spread over all, so that the table adds up
        op_ms *= compute_ms / total_ms if total_ms > 0 else 0.0
        return ComputeTimes(
            op_ms=op_ms,
            compute_ms=compute_ms,
            interval_factors=self._interval(job, summary, log_disagreement, correction, known=known),
            warnings=tuple(self._range_warnings(arrays, op_ms, graph, job, correction, known=known)),
            traits=traits,
            correction=correction,
        )

    def _interval(
        self, job: JobSpec, summary: np.ndarray, log_disagreement: float, correction: Correction | None, *, known: bool
    ) -> tuple[float, float]:
        if correction:
            low, high = correction.interval_log
        else:
            regime = KNOWN_DEVICE if known else UNSEEN_DEVICE
            low, high = self._interval_log(summary, log_disagreement, self._novelty(job), regime)
        return float(np.exp(low)), float(np.exp(high))

    def _novelty(self, job: JobSpec) -> Novelty:
        return self.card.known_devices.novelty(job.device)

    def _interval_log(
        self, summary: np.ndarray, log_disagreement: float, novelty: Novelty, regime: str
    ) -> tuple[float, float]:
        """90 % bounds of log(measured / predicted) in a regime; those of known GPUs where the card has none for it."""
        model = self.card.intervals.get(regime) or self.card.intervals[KNOWN_DEVICE]
        features = interval_features(summary, np.array([log_disagreement]), [novelty])
        low, high = model.bounds(features)[0]
        return float(low), float(high)

    def _range_warnings(
        self,
        arrays: GraphArrays,
        op_ms: np.ndarray,
        graph: OpGraph,
        job: JobSpec,
        correction: Correction | None,
        *,
        known: bool,
    ) -> list[str]:
        """What of this graph and job lies outside what the checkpoint has seen."""
        warnings = []
        if not self.card.has_calibrated_intervals and not correction:
            warnings.append(
                "the 90 % interval says nothing: this checkpoint was trained on too few rows to measure its errors"
            )
        if not known and correction:
            runs = f"{correction.num_runs} run{'s' * (correction.num_runs > 1)}"
            warnings.append(
                f"no measured run on {job.device.name} was in training: the answer rests on its specification and on "
                f"the {runs} of the calibration"
            )
        elif not known:
            warnings.append(
                f"no measured run on {job.device.name} was in training: the answer rests on its specification alone"
            )
        if not correction:
            warnings += device_warnings(self.card.known_devices, job.device).values()
        host_to_gpu = float(arrays.globals[GLOBAL_FEATURE_NAMES.index("log_host_to_gpu")])
        if host_to_gpu > self.card.global_ranges.get("log_host_to_gpu", (0.0, np.inf))[1] + 1e-6:
            warnings.append(
                f"launch-bound: the host takes about {np.exp(host_to_gpu):.1f} times as long to launch the kernels as "
                "the GPU to run them, so that the answer depends on the host: time it on yours"
            )
        for name, text in (
            ("log_batch", "batch size"),
            ("log_physics_ms", "roofline time of the step"),
            ("log_launches", "number of kernels"),
        ):
            low, high = self.card.global_ranges[name]
            value = float(arrays.globals[GLOBAL_FEATURE_NAMES.index(name)])
            if not low - 1e-6 <= value <= high + 1e-6:
                side = "below" if value < low else "above"
                warnings.append(
                    f"{text} {np.exp(value):.3g} is {side} the {np.exp(low):.3g} to {np.exp(high):.3g} that this "
                    "checkpoint has seen"
                )
        # what the passes add (gradients, casts, fills) belongs to the forward op that it serves, whose kind counts
        owners = [op if op.forward_op_idx is None else graph.ops[op.forward_op_idx] for op in graph.ops]
        seen_kinds = {*self.card.known_kinds, "cast"}
        unseen = [i for i, op in enumerate(owners) if op.phase is OpPhase.FORWARD and op.kind not in seen_kinds]
        total = op_ms.sum()
        share = op_ms[unseen].sum() / total if unseen and total else 0.0
        if share > 0.02:
            kinds = sorted({owners[i].kind for i in unseen if op_ms[i] > 0})
            warnings.append(f"{share:.0%} of the time is in op kinds that no training run had: {', '.join(kinds[:5])}")
        if f"precision_{job.precision}" in self.card.global_ranges:
            low, high = self.card.global_ranges[f"precision_{job.precision}"]
            if high <= 0:
                warnings.append(f"no training run had precision {job.precision}: it is extrapolated from the others")
        return warnings


def blend(gnn_ms: np.ndarray | float, trees_ms: np.ndarray | float, tree_weight: float) -> np.ndarray:
    """Weighted geometric mean of the networks' and the trees' step times: what a checkpoint answers."""
    return np.exp((1 - tree_weight) * np.log(gnn_ms) + tree_weight * np.log(trees_ms))


def network_inputs(arrays: GraphArrays, *, specs_known: bool) -> dict[str, np.ndarray]:
    """One graph as the inputs of ``model.onnx``."""
    return {
        "node_features": arrays.node_features,
        "kind_idx": arrays.kind_idx,
        "physics_ms": arrays.physics_ms,
        "count": arrays.count,
        "in_edges": arrays.in_edges,
        "out_edges": arrays.out_edges,
        "globals": arrays.globals[None],
        "specs_known": np.array([specs_known], np.float32),
        "host_launches": np.array([arrays.host_launches], np.float32),
        "host_copy_ms": np.array([arrays.host_copy_ms], np.float32),
    }


def _summary(arrays: GraphArrays) -> np.ndarray:
    """(1, len(SUMMARY_FEATURE_NAMES)) float32."""
    first = np.zeros(1, np.int64)
    return summarise_graphs(arrays.node_features, arrays.physics_ms, arrays.count, arrays.globals[None], first)


def open_session(model_bytes: bytes):
    """An onnxruntime session as predictions use it."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    # tiny networks: thread pools and graph rewrites cost more than they save
    options.intra_op_num_threads = 1
    options.inter_op_num_threads = 1
    options.log_severity_level = 3
    return onnxruntime.InferenceSession(model_bytes, options, providers=["CPUExecutionProvider"])


def arrays_to_json(arrays: GraphArrays) -> dict[str, Any]:
    """A JSON form of checkpoint input, for golden examples."""
    return {name: value.tolist() if isinstance(value, np.ndarray) else value for name, value in vars(arrays).items()}


def arrays_from_json(content: dict[str, Any]) -> GraphArrays:
    """Inverse of :func:`arrays_to_json`."""
    integer = {"kind_idx", "in_edges", "out_edges"}
    values: dict[str, Any] = {}
    for name, value in content.items():
        if isinstance(value, list):
            array = np.array(value, np.int64 if name in integer else np.float32)
            values[name] = array.reshape(2, -1) if name.endswith("edges") else array
        else:
            values[name] = value
    return GraphArrays(**values)


def _check_golden(checkpoint: Checkpoint, golden: dict[str, Any]) -> None:
    for example in golden["examples"]:
        _, step_ms = checkpoint.run(arrays_from_json(example["arrays"]), specs_known=example["specs_known"])
        if abs(step_ms / example["step_ms"] - 1) > GOLDEN_TOLERANCE:
            raise GnnpredError(
                f"checkpoint {checkpoint.card.name!r} gives {step_ms:.4f} ms for golden example "
                f"{example['name']!r} instead of {example['step_ms']:.4f}: it is damaged or onnxruntime is broken"
            )
