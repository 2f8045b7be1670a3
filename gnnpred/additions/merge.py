"""Merge a collection into a corpus: everything is worked out first, then written together, or not at all."""

import datetime
import json
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from gnnpred.additions.architectures import KnownArchitectures
from gnnpred.additions.collection import Collection, read_collection
from gnnpred.additions.corpus_state import (
    OPERATORS_FILE,
    README_FILE,
    SPLITS_FOLDER,
    CorpusState,
    Writer,
    read_corpus,
    replace_files,
)
from gnnpred.additions.outliers import KINDS, UNSTEADY, Mark, marks_of
from gnnpred.additions.report import AddReport, MarkedRow, configuration_text, measured_elsewhere, repeats_of
from gnnpred.additions.rows import CPU_ARCHITECTURE, MIN_TIMED_STEPS, CollectedCorpus, corpus_of, device_of
from gnnpred.corpus.collections import COLLECTIONS_FOLDER, SOURCE_PREFIX, is_collected
from gnnpred.corpus.devices import DEVICES_FOLDER, device_text
from gnnpred.corpus.operators import write_operator_rows
from gnnpred.corpus.repeats import mark_repeats
from gnnpred.corpus.source_table import page_with_source_table
from gnnpred.corpus.splits import SPLITS, Split, for_balance, make_split, split_text
from gnnpred.corpus.store import (
    GRAPHS_FILE,
    LAYOUT_GRAPHS_FILE,
    MEASUREMENTS_FILE,
    MULTI_GPU_FILE,
    MeasurementRow,
    load_graphs,
    write_graphs,
    write_rows,
)
from gnnpred.errors import GnnpredError, UsageError
from gnnpred.files import json_digest, require_known
from gnnpred.hardware import DeviceSpec, find_device, load_device_file
from gnnpred.predictor import Predictor

ALL_KINDS = "all"
_FORMAT = 1
_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,79}")

OnProgress = Callable[[str, int, int], None]
Marks = Mapping[str, Sequence[Mark]]  # row_id -> what speaks against the row; nothing for most


def add_collection(
    folder: Path,
    datasets: Path,
    *,
    name: str | None = None,
    dry_run: bool = False,
    accept: Sequence[str] = (),
    device_file: Path | None = None,
    make_predictor: Callable[[], Predictor] = Predictor,
    on_progress: OnProgress = lambda what, done, total: None,
) -> AddReport:
    """Merge what ``folder`` has and the corpus ``datasets`` lacks; the same call again changes nothing.

    ``accept`` names what may speak against a row and networks learn from it all the same: some of ``KINDS``, or
    ``all``. ``device_file`` describes a GPU that the list lacks. ``make_predictor`` gives what new rows are compared
    with. Raises GnnpredError for a folder or a corpus that cannot be read and for an unknown device, UsageError for a
    CPU's rows among those of GPUs and for a name that is taken; the corpus is then as it was.
    """
    accept = _checked_kinds(accept)
    collection = read_collection(folder)
    state = read_corpus(datasets)
    name = _name_of(collection, name, state)
    devices, new_devices, notes = _devices_for(collection, state, device_file)
    _refuse_mixture(collection, state)
    found = corpus_of(
        collection,
        name,
        devices=devices,
        known=KnownArchitectures(state.all_rows, state.graphs),
        on_graph=lambda done, total: on_progress("graphs", done, total),
    )
    previous = state.collections.get(name, {})
    accepted = frozenset(accept) | frozenset(previous.get("accepted", ()))
    num_few_steps = sum(each.row.few_iterations for each in found.rows)
    if num_few_steps:
        notes.append(f"{num_few_steps} rows of fewer than {MIN_TIMED_STEPS} timed steps are kept and not used")
    judgement = _judge(found, previous, make_predictor, on_progress)
    notes += [
        f"checkpoint {judgement.checkpoint} has not seen {device}: as a whole, steps take {factor:.3g} times what it "
        "predicts, which is taken off before rows are compared"
        for device, factor in judgement.factors.items()
    ]
    own = [_flagged(each.row, judgement.marks[each.row.row_id], accepted) for each in found.rows]
    rows = _merged(state.rows, [row for row in own if row.gpus == 1])
    multi_gpu_rows = _merged(state.multi_gpu_rows, [row for row in own if row.gpus > 1])
    own_ids = {row.row_id for row in own}
    is_older = own_ids < set(previous.get("rows", ()))
    target = _Target(
        rows=rows,
        multi_gpu_rows=multi_gpu_rows,
        splits=_splits_of(rows, multi_gpu_rows, state),
        found=found,
        new_devices=new_devices,
        name=name,
        is_older=is_older,
        record=previous | {"accepted": sorted(accepted)}
        if is_older
        else _record(collection, name, found, judgement.marks, accepted, previous),
    )
    files = _changed_files(state, target)
    if files and not dry_run:
        replace_files(state, files)
    return _report(collection, state, target, judgement, files, notes, is_dry_run=dry_run)


@dataclass(frozen=True, kw_only=True)
class _Judgement:
    marks: Marks
    num_not_predicted: int = 0
    factors: Mapping[str, float] = field(default_factory=dict)  # of devices that the checkpoint has not seen
    checkpoint: str = ""  # "" where every row had been judged before


def _judge(
    found: CollectedCorpus,
    previous: Mapping[str, Any],
    make_predictor: Callable[[], Predictor],
    on_progress: OnProgress,
) -> _Judgement:
    """What speaks against each row. What was said before stays, so that adding again after training moves nothing."""
    before: dict[str, Sequence[Mark]] = {
        row_id: [Mark(**mark) for mark in marks] for row_id, marks in previous.get("rows", {}).items()
    }
    own_ids = [each.row.row_id for each in found.rows]
    if all(row_id in before for row_id in own_ids):
        return _Judgement(marks=before)
    predictor = make_predictor()
    found_now = marks_of(
        found.rows, predictor, on_row=lambda done, total: on_progress("rows compared with predictions", done, total)
    )
    return _Judgement(
        marks={row_id: found_now.marks.get(row_id, []) for row_id in own_ids} | before,
        num_not_predicted=found_now.num_not_predicted,
        factors=found_now.factors,
        checkpoint=predictor.checkpoint.card.name,
    )


def _splits_of(
    rows: Sequence[MeasurementRow], multi_gpu_rows: Sequence[MeasurementRow], state: CorpusState
) -> dict[str, Split]:
    known = {name: split.fold_by_group for name, split in state.splits.items()}
    return {name: make_split(name, for_balance(rows, multi_gpu_rows), known=known.get(name)) for name in SPLITS}


def _report(
    collection: Collection,
    state: CorpusState,
    target: "_Target",
    judgement: _Judgement,
    files: Sequence[tuple[Path, Writer]],
    notes: Sequence[str],
    *,
    is_dry_run: bool,
) -> AddReport:
    found, marks = target.found, judgement.marks
    own_ids = frozenset(each.row.row_id for each in found.rows)
    own = [row for row in (*target.rows, *target.multi_gpu_rows) if row.row_id in own_ids]
    known_ids = {row.row_id for row in state.all_rows}
    known_families = state.splits["family"].fold_by_group if "family" in state.splits else {}
    return AddReport(
        collection=target.name,
        datasets=state.folder,
        recipe=collection.recipe,
        device=collection.device,
        is_dry_run=is_dry_run,
        is_changed=bool(files),
        num_rows=len(own),
        num_new=len(own_ids - known_ids),
        num_used=sum(row.used_for_training for row in own),
        num_multi_gpu=sum(row.gpus > 1 for row in own),
        failed=collection.failed,
        without_graph=dict(Counter(row.excluded_reason for row in own if row.excluded_reason).most_common()),
        num_not_predicted=judgement.num_not_predicted,
        checkpoint=judgement.checkpoint,
        marked=tuple(
            MarkedRow(
                row_id=row.row_id,
                configuration=configuration_text(row),
                step_time_ms=row.step_time_ms,
                marks=tuple(marks[row.row_id]),
                is_accepted=not (row.suspect or row.unstable),
            )
            for row in own
            if marks[row.row_id]
        ),
        repeats=repeats_of(own_ids, (*target.rows, *target.multi_gpu_rows)),
        elsewhere=measured_elsewhere(own, state.all_rows),
        num_graphs=len(found.graphs),
        num_new_graphs=sum(graph_id not in state.graphs for graph_id in found.graphs),
        new_architectures={
            row.model: target.splits["architecture"].fold_by_group[row.architecture]
            for row in own
            if row.architecture in found.new_architectures
        },
        new_families={
            family: fold
            for family, fold in target.splits["family"].fold_by_group.items()
            if family not in known_families
        },
        num_operators=len(found.operators),
        num_short_operators=found.num_short_operators,
        notes=tuple(notes),
        files=tuple(str(path.relative_to(state.folder)) for path, _ in files),
    )


def _checked_kinds(accept: Sequence[str]) -> tuple[str, ...]:
    try:
        require_known(accept, (*KINDS, ALL_KINDS), "--accept-outliers", what="kind", listed="kinds are")
    except GnnpredError as error:
        raise UsageError(str(error)) from None
    return KINDS if ALL_KINDS in accept else tuple(accept)


# -- name and device -------------------------------------------------------------------------------
def _name_of(collection: Collection, asked: str | None, state: CorpusState) -> str:
    """The name that the corpus has it under already, the asked one, or one from recipe, device and origin."""
    if asked is not None and not _NAME.fullmatch(asked):
        raise UsageError(f"--name {asked!r}: write small letters, digits, '.', '_' and '-', a letter or digit first")
    own_ids = {line.row_id for line in collection.measured}
    # rows without their collection's file: an addition was cut off between the two
    names = [name for name, entry in state.collections.items() if entry["origin"] == collection.origin]
    names += [row.source_id.removeprefix(SOURCE_PREFIX) for row in state.all_rows if row.row_id in own_ids]
    known = names[0] if names else None
    if known is not None:
        if asked not in (None, known):
            raise UsageError(f"{collection.folder} is in {state.folder} already, under the name {known}: leave --name")
        return known
    words = re.findall("[a-z0-9]+", f"{collection.recipe} {collection.device}".lower())
    name = asked or f"{'-'.join(words)[:60].strip('-')}-{collection.origin[:6]}"
    sources = {row.source_id for row in state.all_rows} | {row.source for row in state.operators}
    if name in state.collections or SOURCE_PREFIX + name in sources:
        raise UsageError(f"{state.folder} holds another collection of the name {name}: choose another --name")
    return name


def _devices_for(
    collection: Collection, state: CorpusState, device_file: Path | None
) -> tuple[dict[str, DeviceSpec], list[DeviceSpec], list[str]]:
    """Devices that the shipped tables lack, by name; those new to the corpus; and what the user should know.

    The corpus's own description stays where it has one, so that what was encoded and trained does not move.
    """
    used = {line.cells["gpu"] for line in collection.measured} | {row.device for row in collection.operators}
    given = load_device_file(device_file) if device_file else None
    if given and given.name.lower() not in {name.lower() for name in used}:
        raise UsageError(
            f"--device-file {device_file} describes {given.name}; {collection.folder} was measured on "
            f"{', '.join(sorted(used))}"
        )
    devices = dict(state.own_devices)
    new: list[DeviceSpec] = []
    notes = []
    for device in filter(None, (given, collection.own_device)):
        if device.name in devices:
            if devices[device.name] != device and device.name in state.own_devices:
                notes.append(f"{state.folder} describes {device.name} already, by other figures: those stay")
        elif device.name.lower() in {name.lower() for name in used}:
            if _is_listed(device.name):
                notes.append(f"{device.name} is in the list of GPUs: its figures there are used, not those of the file")
            else:
                devices[device.name] = device
                new.append(device)
    for name in sorted(used):
        _check_kind(device_of(name, devices), collection)
    return devices, new, notes


def _check_kind(device: DeviceSpec, collection: Collection) -> None:
    """Its description alone keeps a CPU apart from GPUs later."""
    if (device.architecture == CPU_ARCHITECTURE) != collection.is_cpu:
        kind, described = ("a CPU", "is not") if collection.is_cpu else ("a GPU", "is")
        raise GnnpredError(
            f"{collection.folder} was measured on {kind}, and {device.name} {described} described as architecture = "
            f'"{CPU_ARCHITECTURE}": correct the device file'
        )


def _is_listed(name: str) -> bool:
    try:
        return find_device(name).name == name
    except UsageError:
        return False


def _refuse_mixture(collection: Collection, state: CorpusState) -> None:
    """A network that learns from CPUs and GPUs together predicts neither."""
    names = {row.device for row in state.all_rows} | {row.device for row in state.operators}
    cpus = {device.name for device in state.own_devices.values() if device.architecture == CPU_ARCHITECTURE}
    kinds = {name in cpus for name in names}
    if kinds and collection.is_cpu not in kinds:
        mine, theirs = ("a CPU", "GPUs") if collection.is_cpu else ("a GPU", "CPUs")
        raise UsageError(
            f"{collection.folder} was measured on {mine} and {state.folder} holds rows of {theirs}: add it to a corpus "
            "of its own, --datasets NEW-FOLDER"
        )


# -- rows ------------------------------------------------------------------------------------------
def _flagged(row: MeasurementRow, marks: Sequence[Mark], accepted: frozenset[str]) -> MeasurementRow:
    """The row with what speaks against it; whatever is not accepted keeps networks from learning from it."""
    counted = [mark for mark in marks if mark.kind not in accepted]
    notes = [row.note, *(f"{'' if mark in counted else 'accepted: '}{mark.kind}: {mark.detail}" for mark in marks)]
    return replace(
        row,
        suspect=any(mark.kind != UNSTEADY for mark in counted),
        unstable=any(mark.kind == UNSTEADY for mark in counted),
        used_for_training=bool(row.graph_id) and not row.few_iterations and not counted,
        note="; ".join(filter(None, notes)),
    )


def _merged(rows: Sequence[MeasurementRow], own: Sequence[MeasurementRow]) -> list[MeasurementRow]:
    """``rows`` with those of ``own`` in place of their earlier selves, new ones last, and repeats marked anew."""
    own_by_id = {row.row_id: row for row in own}
    merged = [own_by_id.pop(row.row_id, row) for row in rows]
    merged += own_by_id.values()
    is_own = [is_collected(row) for row in merged]
    collected = [
        replace(row, duplicate_of="", used_for_training=row.used_for_training or bool(row.duplicate_of))
        for row, own in zip(merged, is_own, strict=True)
        if own
    ]
    marked = iter(mark_repeats(collected))
    return [next(marked) if own else row for row, own in zip(merged, is_own, strict=True)]


# -- files -----------------------------------------------------------------------------------------
@dataclass(frozen=True, kw_only=True)
class _Target:
    """The corpus as it shall be."""

    rows: list[MeasurementRow]
    multi_gpu_rows: list[MeasurementRow]
    splits: Mapping[str, Split]
    found: CollectedCorpus
    new_devices: Sequence[DeviceSpec]
    name: str
    is_older: bool  # the corpus has all of the collection's rows and others of it: this is a copy from before
    record: dict[str, Any]


def _record(
    collection: Collection,
    name: str,
    found: CollectedCorpus,
    marks: Marks,
    accepted: frozenset[str],
    previous: Mapping[str, Any],
) -> dict[str, Any]:
    """Content of the collection's file; the day stays that on which these rows came.

    What it says of rows that ``found`` lacks stays: they are in the corpus.
    """
    own = {each.row.row_id: [asdict(mark) for mark in marks[each.row.row_id]] for each in found.rows}
    rows = previous.get("rows", {}) | own
    manifests = {json_digest(each): each for each in (*previous.get("manifests", ()), *collection.manifests)}
    record = {
        "format": _FORMAT,
        "name": name,
        "origin": collection.origin,
        "recipe": collection.recipe,
        "recipe_id": collection.recipe_id,
        "recipe_text": collection.recipe_text,
        "device": collection.device,
        "num_rows": len(rows),
        "failed": collection.failed,
        "num_operators": len(found.operators),
        "accepted": sorted(accepted),
        "graphs": dict(sorted((previous.get("graphs", {}) | found.graph_of_file).items())),
        "rows_sha256": json_digest(sorted(rows), 64),
        "manifests": list(manifests.values()),
        "rows": rows,
    }
    is_same = {**previous, "added": ""} == {**record, "added": ""}
    return {**record, "added": previous["added"] if is_same else datetime.date.today().isoformat()}


def _changed_files(state: CorpusState, target: _Target) -> list[tuple[Path, Writer]]:
    """What has to be written, in an order in which the corpus is whole after every file."""
    folder = state.folder
    files: list[tuple[Path, Writer]] = []
    taken = {path.name for path in (folder / DEVICES_FOLDER).glob("*.toml")}
    for device in target.new_devices:
        file = f"{'-'.join(re.findall('[a-z0-9]+', device.name.lower()))[:60] or 'device'}.toml"
        if file in taken:
            file = f"{file.removesuffix('.toml')}-{json_digest(device.name, 6)}.toml"
        taken.add(file)
        files.append((folder / DEVICES_FOLDER / file, _text_writer(device_text(device))))
    new_graphs = [graph for graph_id, graph in target.found.graphs.items() if graph_id not in state.graphs]
    if new_graphs or not (folder / GRAPHS_FILE).is_file():
        layouts = folder / LAYOUT_GRAPHS_FILE
        elsewhere = load_graphs(layouts) if layouts.is_file() else {}
        kept = [state.graphs.encoded(graph_id) for graph_id in state.graphs if graph_id not in elsewhere]
        files.append((folder / GRAPHS_FILE, lambda path: write_graphs(path, [*kept, *new_graphs])))
    for name, split in target.splits.items():
        if name not in state.splits or split.fold_by_group != state.splits[name].fold_by_group:
            files.append((folder / SPLITS_FOLDER / f"{name}.json", _text_writer(split_text(split))))
    if target.multi_gpu_rows != list(state.multi_gpu_rows):
        files.append((folder / MULTI_GPU_FILE, lambda path: write_rows(path, target.multi_gpu_rows, layouts=True)))
    if target.rows != list(state.rows) or not (folder / MEASUREMENTS_FILE).is_file():
        files.append((folder / MEASUREMENTS_FILE, lambda path: write_rows(path, target.rows)))
    # after the rows, by which an addition that was cut off is known again: kernels come once, under the same name
    source = SOURCE_PREFIX + target.name
    operators = list(state.operators)
    if target.found.operators and not target.is_older:
        operators = [row for row in operators if row.source != source] + list(target.found.operators)
    if operators != list(state.operators) or not (folder / OPERATORS_FILE).is_file():
        files.append((folder / OPERATORS_FILE, lambda path: write_operator_rows(operators, path)))
    page = page_with_source_table(folder / README_FILE, target.rows, target.multi_gpu_rows)
    if page is not None and page != (folder / README_FILE).read_text(encoding="utf-8"):
        files.append((folder / README_FILE, _text_writer(page)))
    if target.record != state.collections.get(target.name):
        text = json.dumps(target.record, indent=1) + "\n"
        files.append((folder / COLLECTIONS_FOLDER / f"{target.name}.json", _text_writer(text)))
    return files


def _text_writer(text: str) -> Writer:
    def write(path: Path) -> None:
        path.write_text(text, encoding="utf-8")

    return write
