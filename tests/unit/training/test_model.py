"""The network, its training loop and its export."""

import dataclasses

import numpy as np
import onnxruntime
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("torch_geometric")

from gnnpred.checkpoint import Checkpoint, load_checkpoint, network_inputs  # noqa: E402
from gnnpred.costs import op_costs  # noqa: E402
from gnnpred.errors import GnnpredError, UsageError  # noqa: E402
from gnnpred.features import COMPONENTS, GraphArrays, encode, graph_structure  # noqa: E402
from gnnpred.hardware import find_device  # noqa: E402
from gnnpred.intervals import KNOWN_DEVICE, IntervalModel  # noqa: E402
from gnnpred.job import JobSpec, Phase, Precision  # noqa: E402
from gnnpred.passes.step import complete_step, lower_forward  # noqa: E402
from gnnpred.training.data import FlatRows  # noqa: E402
from gnnpred.training.loop import TrainSettings, predict_rows, train_model  # noqa: E402
from gnnpred.training.model import AGGREGATIONS, LAYER_KINDS, ModelSettings, Neighbours, StepTimeGNN  # noqa: E402
from gnnpred.training.networks import blend_networks  # noqa: E402
from gnnpred.training.release import export_onnx, write_checkpoint  # noqa: E402
from gnnpred.training.trees import export_trees, fit_trees, roofline_of, summed_features  # noqa: E402
from tests.helpers.graphs import tiny_cnn  # noqa: E402

pytestmark = pytest.mark.train
DEVICES = ("V100-SXM2-16GB", "A100-SXM4-80GB", "RTX3090", "T4")


def _arrays(batch_size: int, device: str, precision: Precision) -> GraphArrays:
    lowered = lower_forward(tiny_cnn(), batch_size=batch_size, precision=precision)
    full = complete_step(lowered, phase=Phase.TRAIN, optimizer="sgd")
    return encode(graph_structure(full, op_costs(full)), JobSpec(device=find_device(device), precision=precision))


@pytest.fixture(scope="module")
def rows() -> FlatRows:
    return FlatRows.from_arrays(
        [_arrays(b, d, p) for b in (4, 16, 64, 256, 1024) for d in DEVICES for p in (Precision.FP32, Precision.MIXED)]
    )


def _model(seed: int = 0, **settings) -> StepTimeGNN:
    torch.manual_seed(seed)
    model = StepTimeGNN(ModelSettings(**settings))
    for head in (model.head, model.scale_head):
        torch.nn.init.normal_(head.weight, std=0.3)
    return model.eval()


def _ones(count: int) -> np.ndarray:
    return np.ones(count, np.float32)


def test_untrained_network_answers_with_the_physics_or_the_launch_rate(rows):
    model = StepTimeGNN(ModelSettings(host_branch=False)).eval()
    batch = rows.batch(np.arange(rows.num_rows), specs_known=_ones(rows.num_rows))
    op_ms, step_ms, deviation = model(batch)
    physics = np.add.reduceat(rows.physics_ms.sum(1) * rows.count, rows.node_start[:-1])
    assert step_ms.detach().numpy() == pytest.approx(physics, rel=1e-4)
    assert op_ms.detach().numpy() == pytest.approx(rows.physics_ms, rel=1e-4)
    assert deviation.detach().numpy() == pytest.approx(0)


def test_answers_do_not_depend_on_which_graphs_share_a_batch(rows):
    model = _model()
    together = predict_rows(model, rows, np.arange(rows.num_rows), specs_known=_ones(rows.num_rows))
    alone = [predict_rows(model, rows, np.array([i]), specs_known=_ones(1))[0] for i in range(rows.num_rows)]
    assert together == pytest.approx(alone, rel=1e-4)


def test_a_hidden_specification_does_not_reach_the_answer(rows):
    model = _model()
    changed = dataclasses.replace(rows, globals=rows.globals.copy())
    changed.globals[:, :10] += 3.0  # the device specification columns
    index = np.arange(rows.num_rows)
    hidden = np.zeros(rows.num_rows, np.float32)
    assert predict_rows(model, changed, index, specs_known=hidden) == pytest.approx(
        predict_rows(model, rows, index, specs_known=hidden)
    )
    assert predict_rows(model, changed, index, specs_known=_ones(rows.num_rows)) != pytest.approx(
        predict_rows(model, rows, index, specs_known=_ones(rows.num_rows)), rel=1e-3
    )


def test_messages_reach_the_answer(rows):
    model = _model()
    cut = dataclasses.replace(
        rows, in_edges=rows.in_edges[:, :0], in_start=np.zeros_like(rows.in_start),
        out_edges=rows.out_edges[:, :0], out_start=np.zeros_like(rows.out_start),
    )  # fmt: skip
    index = np.arange(rows.num_rows)
    with_messages = predict_rows(model, rows, index, specs_known=_ones(rows.num_rows))
    assert predict_rows(model, cut, index, specs_known=_ones(rows.num_rows)) != pytest.approx(with_messages, rel=1e-3)


LAYERS = [(kind, aggregation) for kind in LAYER_KINDS for aggregation in AGGREGATIONS]


@pytest.mark.parametrize(("layer_kind", "aggregation"), LAYERS)
def test_every_kind_of_layer_learns_from_neighbours_alone_and_batches_alike(rows, layer_kind, aggregation):
    model = _model(layer_kind=layer_kind, aggregation=aggregation, dropout=0.0)
    index = np.arange(0, rows.num_rows, 5)
    together = predict_rows(model, rows, index, specs_known=_ones(len(index)))
    alone = [predict_rows(model, rows, np.array([i]), specs_known=_ones(1))[0] for i in index]
    assert together == pytest.approx(alone, rel=1e-4)
    model.train()
    model(rows.batch(index, specs_known=_ones(len(index))))[1].sum().backward()
    for name, parameter in model.layers.named_parameters():
        assert parameter.grad is not None, name
        assert torch.isfinite(parameter.grad).all(), name


def test_aggregations_are_what_they_are_called():
    x = torch.tensor([[1.0], [2.0], [4.0], [-3.0]])
    edges = torch.tensor([[0, 1, 2, 3], [0, 0, 0, 1]])  # three neighbours of op 0, one of op 1, none of the others
    expected = {"sum": [7, -3, 0, 0], "mean": [7 / 3, -3, 0, 0], "root": [7 / 3**0.5, -3, 0, 0], "max": [4, -3, 0, 0]}
    assert set(expected) == set(AGGREGATIONS)
    for aggregation, values in expected.items():
        neighbours = Neighbours(aggregation)
        assert neighbours(x, edges)[:, 0].tolist() == pytest.approx(values, rel=1e-5)
        assert neighbours.of_edges(x[edges[0]], edges, 4)[:, 0].tolist() == pytest.approx(values, rel=1e-5)


@pytest.mark.parametrize(("layer_kind", "aggregation"), [("gated", "max"), ("gated", "mean"), ("attention", "root")])
def test_every_kind_of_layer_runs_the_same_in_onnxruntime(rows, layer_kind, aggregation):
    members = [_model(layer_kind=layer_kind, aggregation=aggregation), _model(num_layers=0)]
    shares = np.array([0.6, 0.4])
    session = onnxruntime.InferenceSession(export_onnx(members, shares))
    for row in (0, rows.num_rows - 1):
        arrays = rows.arrays_of(row)
        given = network_inputs(arrays, specs_known=True)
        wanted = {one.name for one in session.get_inputs()}
        (step_ms,) = session.run(["step_ms"], {name: value for name, value in given.items() if name in wanted})
        answers = [predict_rows(member, rows, np.array([row]), specs_known=_ones(1)) for member in members]
        assert step_ms == pytest.approx(blend_networks(answers, shares), rel=1e-4)


def test_training_overfits_a_tiny_set(rows):
    rng = np.random.default_rng(0)
    physics = np.add.reduceat(rows.physics_ms.sum(1) * rows.count, rows.node_start[:-1])
    target = physics * np.exp(rng.normal(0.5, 0.4, rows.num_rows))
    settings = TrainSettings(epochs=150, graphs_per_batch=10, hide_specs=0.0, op_weight=0.0,
                             model=ModelSettings(dropout=0.0, kind_dropout=0.0))  # fmt: skip
    index = np.arange(rows.num_rows)
    model = train_model(rows, target, index, np.ones(rows.num_rows), settings, seed=0)
    error = np.abs(predict_rows(model, rows, index, specs_known=_ones(rows.num_rows)) / target - 1)
    assert np.median(error) < 0.06
    assert np.median(np.abs(physics / target - 1)) > 0.25  # the task was not trivial


def test_the_pair_loss_pulls_ratios_between_precisions_towards_the_measured_ones(rows):
    """Steps are measured right on average but every ratio is 4: only the pair loss sees all of that."""
    physics = np.add.reduceat(rows.physics_ms.sum(1) * rows.count, rows.node_start[:-1])
    index = np.arange(rows.num_rows)
    partner = index ^ 1  # the fixture puts fp32 and mixed side by side
    target = physics * np.where(index % 2 == 0, 2.0, 0.5)

    def ratio_error(pair_weight: float, known_partner: np.ndarray) -> float:
        settings = TrainSettings(epochs=8, graphs_per_batch=10, op_weight=0.0, pair_weight=pair_weight)
        model = train_model(rows, target, index, np.ones(rows.num_rows), settings, seed=0, partner_idx=known_partner)
        predicted = predict_rows(model, rows, index, specs_known=_ones(rows.num_rows))
        ratio = predicted[::2] / predicted[1::2]
        return float(np.abs(np.log(ratio / (target[::2] / target[1::2]))).mean())

    without = ratio_error(0.0, partner)
    assert ratio_error(4.0, partner) < without - 0.02
    assert ratio_error(4.0, np.full(rows.num_rows, -1)) == pytest.approx(without)


def test_training_is_repeatable_for_a_seed(rows):
    settings = TrainSettings(epochs=2, graphs_per_batch=10, op_weight=0.0)
    index = np.arange(rows.num_rows)
    target = np.linspace(1, 5, rows.num_rows)
    answers = [
        predict_rows(
            train_model(rows, target, index, np.ones(rows.num_rows), settings, seed=seed), rows, index,
            specs_known=_ones(rows.num_rows),
        )
        for seed in (1, 1, 2)
    ]  # fmt: skip
    assert answers[0] == pytest.approx(answers[1], rel=1e-6)
    assert answers[0] != pytest.approx(answers[2], rel=1e-4)


def _trees(rows: FlatRows):
    """Trees over rows that were doubled with noise, so that they have something to split."""
    features = np.repeat(summed_features(rows), 20, axis=0)
    rng = np.random.default_rng(0)
    log_ratio = 0.1 * features[:, -1] + rng.normal(0, 0.2, len(features))
    return fit_trees(features, log_ratio.astype(np.float64), np.arange(len(features)))


@pytest.fixture(scope="module")
def checkpoint_folder(rows, tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoint") / "tiny"
    write_checkpoint(
        folder, name="tiny", members=[_model(0), _model(1)], shares=np.array([0.3, 0.7]), trees=_trees(rows),
        tree_weight=0.4, golden={"first": (rows.arrays_of(0), True)},
        known_kinds=["conv", "relu", "reduce_mean", "linear"], device_rows=dict.fromkeys(DEVICES, 500),
        global_ranges={"log_batch": (0, 5), "log_physics_ms": (-9, 9), "log_launches": (0, 9)},
        intervals={KNOWN_DEVICE: IntervalModel.constant(-0.2, 0.3).as_dict()}, default_framework_version="2.1",
        details={},
    )  # fmt: skip
    return folder


def test_the_exported_checkpoint_equals_torch_and_scikit_learn_on_every_row(rows, checkpoint_folder):
    checkpoint = load_checkpoint(checkpoint_folder)
    assert isinstance(checkpoint, Checkpoint)
    members = [_model(0), _model(1)]
    index = np.arange(rows.num_rows)
    logs = [np.log(predict_rows(m, rows, index, specs_known=_ones(rows.num_rows))) for m in members]
    trees_ms = roofline_of(rows) * np.exp(_trees(rows).predict(summed_features(rows)))
    gnn_ms = np.exp(0.3 * logs[0] + 0.7 * logs[1])
    assert np.abs(logs[1] - logs[0]).max() > 0.05
    assert np.abs(np.log(trees_ms / gnn_ms)).max() > 0.1  # the blend is not trivial
    expected = gnn_ms**0.6 * trees_ms**0.4
    got = []
    for row in range(rows.num_rows):
        node_ms, step_ms = checkpoint.run(rows.arrays_of(row), specs_known=True)
        assert node_ms.shape == (np.diff(rows.node_start)[row], len(COMPONENTS))
        got.append(step_ms)
    assert got == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize(
    ("file", "change", "message"),
    [
        ("model.onnx", lambda data: data[:-10], "model.onnx does not match the hash"),
        ("trees.onnx", lambda data: data[:-10], "trees.onnx does not match the hash"),
        ("card.json", lambda data: data.replace(b'"share_forward"', b'"share_forwards"'), "another feature schema"),
        (
            "card.json",
            lambda data: data.replace(b'"log_physics_us_forward"', b'"log_physics_us_forwards"'),
            "another feature schema",
        ),
        ("card.json", lambda data: data[:50], "not valid JSON"),
        ("golden.json", lambda data: data.replace(b'"step_ms":', b'"step_ms":1'), "golden example"),
    ],
)
def test_a_damaged_checkpoint_is_refused_in_one_line(checkpoint_folder, tmp_path, file, change, message):
    folder = tmp_path / "copy"
    folder.mkdir()
    for path in checkpoint_folder.iterdir():
        data = path.read_bytes()
        (folder / path.name).write_bytes(change(data) if path.name == file else data)
    with pytest.raises(GnnpredError, match=message) as caught:
        load_checkpoint(folder)
    assert "\n" not in str(caught.value)


def test_exported_trees_take_the_branches_of_scikit_learn_on_their_thresholds(rows):
    trees = _trees(rows)
    features = summed_features(rows)
    thresholds = {
        (int(node["feature_idx"]), float(node["num_threshold"]))
        for (tree,) in trees._predictors
        for node in tree.nodes
        if not node["is_leaf"]
    }
    probes = np.repeat(features[:1], 3 * len(thresholds), axis=0)
    for i, (column, threshold) in enumerate(sorted(thresholds)):
        at = np.float32(threshold)
        probes[3 * i : 3 * i + 3, column] = np.nextafter(at, np.float32(-9e9)), at, np.nextafter(at, np.float32(9e9))
    session = onnxruntime.InferenceSession(export_trees(trees))
    (answer,) = session.run(["log_ratio"], {"features": probes})
    assert len(thresholds) > 10
    assert answer[:, 0] == pytest.approx(trees.predict(probes), abs=1e-5)


def test_a_checkpoint_without_trees_answers_with_the_networks_alone(rows, checkpoint_folder, tmp_path):
    card = load_checkpoint(checkpoint_folder).card
    write_checkpoint(
        tmp_path / "plain", name="plain", members=[_model(0)], shares=np.ones(1),
        golden={"first": (rows.arrays_of(0), True)},
        known_kinds=card.known_kinds, device_rows=card.known_devices.rows_by_device,
        global_ranges=card.global_ranges, intervals={k: model.as_dict() for k, model in card.intervals.items()},
        default_framework_version="2.1", details={},
    )  # fmt: skip
    plain = load_checkpoint(tmp_path / "plain")
    assert not (tmp_path / "plain" / "trees.onnx").exists()
    expected = predict_rows(_model(0), rows, np.array([3]), specs_known=_ones(1))[0]
    assert plain.run(rows.arrays_of(3), specs_known=True)[1] == pytest.approx(expected, rel=1e-4)


def test_an_unknown_checkpoint_names_what_there_is():
    with pytest.raises(UsageError, match="not found"):
        load_checkpoint("no-such-checkpoint")
