"""The held-out experiments: which rows train, which test, and the networks of every fold.

A **track** is a way of holding out groups (unseen family, unseen architecture, unseen GPU ...); a **fold** is one
held-out group set of it; every fold is trained with its test rows unseen and kept as a safetensors file, so that
scoring again takes minutes and training again is a choice.
"""

import hashlib
import logging
import multiprocessing
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

import numpy as np

from gnnpred.corpus.devices import load_own_devices
from gnnpred.corpus.operators import OperatorRow, load_operator_rows
from gnnpred.corpus.splits import MIN_ROWS_OF_HELD_OUT_DEVICE, Split, load_split
from gnnpred.corpus.store import GraphStore, MeasurementRow, load_graphs, load_rows
from gnnpred.errors import GnnpredError
from gnnpred.features import GraphArrays
from gnnpred.files import replaced_when_done
from gnnpred.hardware import DeviceSpec
from gnnpred.training.data import FlatRows
from gnnpred.training.loop import OperatorRows, TrainSettings
from gnnpred.training.rows import encode_operator_rows, encode_rows

logger = logging.getLogger(__name__)

FEW_ROWS = 200  # encoded sooner than the processes that would encode them have started
# The test GPUs of NeuSight (A100 80 GB PCIe, H100 SXM, L4), each with its twin in another form factor.
NEUSIGHT_DEVICES = ("A100-PCIe-80GB", "A100-SXM4-80GB", "H100-PCIe-80GB", "H100-SXM5-80GB", "L4")


@dataclass(frozen=True)
class Corpus:
    """Everything the experiments read. n rows, all single-GPU, in the order of ``rows``."""

    rows: tuple[MeasurementRow, ...]
    aware: FlatRows
    blind: FlatRows | None  # the same rows without precision; None where no blind track was asked for
    operators: OperatorRows | None  # None where the corpus has none
    operator_rows: tuple[OperatorRow, ...]
    splits: dict[str, Split]

    @cached_property
    def target_ms(self) -> np.ndarray:
        return np.array([row.step_time_ms for row in self.rows])

    @cached_property
    def devices(self) -> np.ndarray:
        return np.array([row.spec.name for row in self.rows])

    @cached_property
    def precisions(self) -> np.ndarray:
        return np.array([row.precision for row in self.rows])

    @cached_property
    def is_inference(self) -> np.ndarray:
        return np.array([row.phase == "inference" for row in self.rows])

    @cached_property
    def operator_devices(self) -> np.ndarray:
        return np.array([row.spec.name for row in self.operator_rows])

    @cached_property
    def device_specs(self) -> dict[str, DeviceSpec]:
        """Every device of the rows, by the names in ``devices``."""
        return {row.spec.name: row.spec for row in self.rows}

    def fold_of(self, grouping: str) -> np.ndarray:
        """(n,) int64 fold of each row under ``family``, ``architecture`` or ``random``."""
        return np.array([self.splits[grouping].fold_of(row) for row in self.rows])


def load_corpus(
    datasets: Path,
    settings: "RecipeSettings",
    *,
    with_blind: bool,
    cache: Path | None = None,
    num_workers: int = 2,
    on_row: Callable[[int, int], None] = lambda done, total: None,
) -> Corpus:
    """Read rows, graphs, operator rows and splits; encode them, or take the arrays from ``cache``.

    Training rows are those that the corpus marks for training; of the inference rows a sample spread over
    devices, precisions and software joins them. ``on_row`` is told how many rows are encoded.
    """
    rows, operator_rows = corpus_rows(datasets, settings)
    digest = encoding_digest(datasets, rows)
    flats: dict[str, FlatRows] = {}
    for name in ("aware", "blind") if with_blind else ("aware",):
        path = cache / f"{name}-{digest}.npz" if cache else None
        if path and path.exists():
            flats[name] = FlatRows.load(path)
            continue
        flats[name] = FlatRows.from_arrays(_encode_parallel(datasets, rows, name == "blind", num_workers, on_row))
        if path:
            flats[name].save(path)
    sample = f"-{settings.operator_rows}" if settings.operator_rows else ""
    operators_cache = cache / f"operators-{digest}{sample}.npz" if cache else None
    names = ("family", "architecture", "random")
    return Corpus(
        rows=tuple(rows),
        aware=flats["aware"],
        blind=flats.get("blind"),
        operators=_encoded_operators(operator_rows, operators_cache) if operator_rows else None,
        operator_rows=operator_rows,
        splits={name: load_split(datasets / "splits" / f"{name}.json") for name in names},
    )


def _encoded_operators(rows: Sequence[OperatorRow], path: Path | None) -> OperatorRows:
    if path and path.exists():
        with np.load(path, allow_pickle=False) as stored:
            timed = stored["timed"]
        flat = FlatRows.load(path.with_suffix(".rows.npz"))
    else:
        encoded, timed = encode_operator_rows(rows)
        flat = FlatRows.from_arrays(encoded)
        if path:
            flat.save(path.with_suffix(".rows.npz"))
            with replaced_when_done(path) as partial, partial.open("wb") as file:
                np.savez(file, timed=timed)
    return OperatorRows(flat, timed, np.array([row.time_us for row in rows]) / 1e3)


Progress = Callable[[str, int, int], None]  # what, done, total


def load_encoded_corpus(
    datasets: Path,
    settings: "RecipeSettings",
    work: Path,
    num_workers: int,
    on_progress: Progress,
    *,
    with_blind: bool,
) -> Corpus:
    """:func:`load_corpus` with the encoded rows kept in ``work`` and its progress reported as ``rows encoded``."""
    return load_corpus(
        datasets,
        settings,
        with_blind=with_blind,
        cache=work / "encoded",
        num_workers=num_workers,
        on_row=lambda done, total: on_progress("rows encoded", done, total),
    )


def corpus_rows(datasets: Path, settings: "RecipeSettings") -> tuple[list[MeasurementRow], tuple[OperatorRow, ...]]:
    """The step rows and the single-kernel rows that a recipe reads, before anything is encoded."""
    rows = choose_rows(load_rows(datasets), settings.inference_rows, settings.training_rows)
    if all(row.phase == "inference" for row in rows):
        raise GnnpredError(
            f"{datasets} has no row of a training step that may be learned from: 'gnnpred dataset add' shows what was "
            "marked and why"
        )
    operator_rows = load_operator_rows(datasets / "operators.csv.gz")
    if 0 < settings.operator_rows < len(operator_rows):
        picked = np.random.default_rng(0).choice(len(operator_rows), settings.operator_rows, replace=False)
        operator_rows = [operator_rows[i] for i in sorted(picked)]
    return rows, tuple(operator_rows)


def choose_rows(rows: list[MeasurementRow], num_inference: int, num_training: int = 0) -> list[MeasurementRow]:
    """Rows marked for training, and a sample of inference rows, even over (device, precision, software, layout).

    ``num_training`` above 0 takes a sample of the training rows as well, even over families.
    """
    # WaveGlow's graph lacks the log-determinants of its convolutions, whose host cost dominates small steps
    usable = [row for row in rows if row.used_for_training and row.graph_id and row.family != "waveglow"]
    chosen = [row for row in usable if row.phase != "inference"]
    if num_training:
        families = sorted({row.family for row in chosen})
        # a sample of fewer rows than families takes families at random, not the first of the alphabet
        order = dict(zip(families, np.random.default_rng(0).permutation(len(families)), strict=True))
        by_family: dict[tuple, list[MeasurementRow]] = {}
        for row in chosen:
            by_family.setdefault((order[row.family],), []).append(row)
        chosen = _even_sample(by_family, num_training)
    groups: dict[tuple, list[MeasurementRow]] = {}
    for row in usable:
        if row.phase == "inference" and row.compiler != "tensorrt":
            key = (row.device, row.precision, row.framework_version, row.memory_format, row.compiler)
            groups.setdefault(key, []).append(row)
    return chosen + _even_sample(groups, num_inference)


def _even_sample(groups: dict[tuple, list[MeasurementRow]], num_rows: int) -> list[MeasurementRow]:
    """One row of every group after another, at random within a group, until there are enough."""
    rng = np.random.default_rng(0)
    shuffled = [[group[i] for i in rng.permutation(len(group))] for _, group in sorted(groups.items())]
    sample: list[MeasurementRow] = []
    for depth in range(max(map(len, shuffled), default=0)):
        sample += [group[depth] for group in shuffled if depth < len(group)]
        if len(sample) >= num_rows:
            break
    return sample[:num_rows]


def encoding_digest(datasets: Path, rows: list[MeasurementRow]) -> str:
    """Name of the encoded arrays: changes with the rows and with the code and tables that encode them."""
    package = Path(__file__).parent.parent
    digest = hashlib.sha256()
    code = [
        package / name
        for name in ("features.py", "graph.py", "op_kinds.py", "job.py", "software.py", "training/rows.py")
    ]
    for folder in ("passes", "costs", "hardware"):  # tables too: autocast lists and device figures shape the arrays
        code += sorted(p for p in (package / folder).rglob("*") if p.suffix in (".py", ".toml", ".csv"))
    for path in [*code, datasets / "graphs.jsonl.xz", datasets / "operators.csv.gz"]:
        digest.update(path.read_bytes())
    for device in load_own_devices(datasets).values():
        digest.update(repr(device).encode())
    digest.update("\n".join(map(repr, rows)).encode())  # what a row says of its job shapes the arrays as well
    return digest.hexdigest()[:16]


def _encode_parallel(
    datasets: Path, rows: list[MeasurementRow], blind: bool, num_workers: int, on_row: Callable[[int, int], None]
) -> list[GraphArrays]:
    """``encode_rows`` in several processes; rows of one graph stay together."""
    if len(rows) <= FEW_ROWS:
        encoded_here = encode_rows(rows, load_graphs(datasets).__getitem__, blind=blind)
        on_row(len(rows), len(rows))
        return encoded_here
    order = sorted(range(len(rows)), key=lambda i: rows[i].graph_id)
    num_chunks = max(1, min(40, len(rows) // 50))
    chunks = [order[len(order) * c // num_chunks : len(order) * (c + 1) // num_chunks] for c in range(num_chunks)]
    encoded: list[GraphArrays | None] = [None] * len(rows)
    done = 0
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(num_workers, mp_context=context, initializer=_open_graphs, initargs=(datasets,)) as pool:
        futures = {pool.submit(_encode_chunk, [rows[i] for i in chunk], blind): chunk for chunk in chunks}
        for future in as_completed(futures):
            for i, arrays in zip(futures[future], future.result(), strict=True):
                encoded[i] = arrays
            done += len(futures[future])
            on_row(done, len(rows))
    return encoded  # type: ignore[return-value]


_GRAPHS: list[GraphStore] = []


def _open_graphs(datasets: Path) -> None:
    _GRAPHS.append(load_graphs(datasets))


def _encode_chunk(rows: list[MeasurementRow], blind: bool) -> list[GraphArrays]:
    return encode_rows(rows, _GRAPHS[0].__getitem__, blind=blind)


@dataclass(frozen=True)
class Fold:
    """One network to train: positions of rows, and what it may see."""

    track: str
    name: str
    train_idx: np.ndarray
    test_idx: np.ndarray
    is_blind: bool = False
    hidden_devices: tuple[str, ...] = ()  # GPUs of which the fold sees neither steps nor kernels

    def file_name(self, member: "Member") -> str:
        kind = "p" if member.is_per_op else "s"
        return f"{self.track}-{self.name}-{kind}{member.seed}.safetensors"


def folds_of(corpus: Corpus, track: str) -> Iterator[Fold]:
    """The folds of a track: family, architecture, random, device, neusight, blind, blind_fp32."""
    is_training = ~corpus.is_inference
    everything = np.arange(len(corpus.rows))
    if track == "final":
        yield Fold(track, "all", everything, everything[:0])
        return
    if track == "device":
        names, counts = np.unique(corpus.devices[is_training], return_counts=True)
        for name in names[counts >= MIN_ROWS_OF_HELD_OUT_DEVICE]:
            held_out = corpus.devices == name
            yield Fold(
                track, name, everything[~held_out], everything[held_out & is_training], hidden_devices=(str(name),)
            )
        return
    if track == "neusight":
        held_out = np.isin(corpus.devices, NEUSIGHT_DEVICES)
        is_point = np.array([row.source_id.startswith("neusight") for row in corpus.rows])
        test = held_out & is_training & is_point
        if test.any():
            yield Fold(track, "all", everything[~held_out], everything[test], hidden_devices=NEUSIGHT_DEVICES)
        return
    grouping = {"blind": "family", "blind_fp32": "family"}.get(track, track)
    fold = corpus.fold_of(grouping)
    for number in range(int(fold.max()) + 1):
        train = fold != number
        test = (fold == number) & is_training
        if track == "blind_fp32":
            train = train & np.isin(corpus.precisions, ("fp32", "tf32"))
        yield Fold(track, str(number), everything[train], everything[test], is_blind=track.startswith("blind"))


def row_weights(corpus: Corpus, settings: "RecipeSettings") -> np.ndarray:
    """(n,) float: groups of (source family, device, precision) count by a power of their size."""
    keys = [(row.source_id.split("-")[0], row.device, row.precision, row.phase) for row in corpus.rows]
    sizes: dict[tuple, int] = {}
    for key in keys:
        sizes[key] = sizes.get(key, 0) + 1
    weight = np.array([sizes[key] ** -settings.group_balance for key in keys])
    weight[corpus.is_inference] *= settings.inference_weight
    return weight / weight.mean()


def configuration_of(row: MeasurementRow) -> tuple:
    """What two rows share that differ in precision alone."""
    return (
        row.source_id, row.model, row.device, row.batch_size, row.input, row.framework_version, row.memory_format,
        row.phase, row.optimizer, row.compiler, row.os, row.host_copy, row.data_loader,
    )  # fmt: skip


def precision_pairs(rows: Sequence[MeasurementRow]) -> list[tuple[int, int]]:
    """(full, half) positions of rows that differ in precision alone: fp32 or tf32 against fp16 or mixed."""
    groups: dict[tuple, dict[str, int]] = defaultdict(dict)
    for i, row in enumerate(rows):
        if row.phase != "inference":
            groups[configuration_of(row)].setdefault(row.precision, i)
    pairs = []
    for found in groups.values():
        full = found.get("fp32", found.get("tf32"))
        pairs += [(full, found[half]) for half in ("fp16", "mixed") if full is not None and half in found]
    return pairs


def partners_of(rows: Sequence[MeasurementRow]) -> np.ndarray:
    """(n,) int64: the half-precision row of each full-precision one and the other way round; -1 for none."""
    partner = np.full(len(rows), -1, np.int64)
    for full, half in precision_pairs(rows):
        partner[full], partner[half] = half, full
    return partner


@dataclass(frozen=True)
class Member:
    """One network of an ensemble."""

    seed: int
    is_per_op: bool = False  # without message layers: sees every op by itself


@dataclass(frozen=True, kw_only=True)
class RecipeSettings:
    """A recipe file (trainers/*.toml): training settings, ensemble sizes, row weights."""

    train: TrainSettings = field(default_factory=TrainSettings)
    seeds: int = 3  # networks with messages of the shipped ensemble
    fold_seeds: int = 1  # the same of each family and architecture fold
    device_seeds: int = 1  # the same of every other fold
    per_op_seeds: int = 0  # networks without messages that join each of these ensembles
    per_op_weight: float = 0.5  # share of the per-op networks in the geometric mean of all networks
    group_balance: float = 0.2  # 0 = every row counts alike, 1 = every group counts alike
    tree_weight: float = 0.4  # share of the boosted trees in the geometric mean with the networks
    inference_weight: float = 0.3
    inference_rows: int = 3000
    training_rows: int = 0  # sample of training rows, even over families; 0 = all
    operator_rows: int = 0  # sample of single-kernel rows; 0 = all

    def members_of(self, track: str) -> tuple[Member, ...]:
        """Networks per fold of a track; the blind tracks compare single networks with messages."""
        num_seeds = {"final": self.seeds, "family": self.fold_seeds, "architecture": self.fold_seeds}
        with_messages = tuple(Member(seed) for seed in range(num_seeds.get(track, self.device_seeds)))
        num_per_op = 0 if track.startswith("blind") else self.per_op_seeds
        return with_messages + tuple(Member(seed, is_per_op=True) for seed in range(num_per_op))

    def train_of(self, member: Member) -> TrainSettings:
        """How a member is trained; a per-op network differs in its missing message layers alone."""
        if not member.is_per_op:
            return self.train
        return replace(self.train, model=replace(self.train.model, num_layers=0))

    def shares_of(self, members: Sequence[Member]) -> np.ndarray:
        """(m,) shares of the members in the geometric mean, which sum to 1."""
        is_per_op = np.array([member.is_per_op for member in members])
        if is_per_op.all() or not is_per_op.any():
            return np.full(len(members), 1 / len(members))
        per_op, others = self.per_op_weight / is_per_op.sum(), (1 - self.per_op_weight) / (~is_per_op).sum()
        return np.where(is_per_op, per_op, others)
