"""What a trial's answers cost whoever predicts: time and bytes of the ensemble whose error the trial measures.

Both are known before anything is trained, because they depend on the networks' shapes alone.
"""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from gnnpred.checkpoint import network_inputs, open_session
from gnnpred.errors import UsageError
from gnnpred.files import json_digest
from gnnpred.graph_summary import summarise_graphs
from gnnpred.training.experiments import Corpus, RecipeSettings
from gnnpred.training.model import StepTimeGNN
from gnnpred.training.release import export_onnx
from gnnpred.training.trees import export_trees

ERROR, LATENCY, SIZE = OBJECTIVES = ("error", "latency", "size")
LATENCY_RATIO, SIZE_BYTES, NETWORKS = "latency_ratio", "size_bytes", "networks"  # user attributes of a trial
NUM_WARM_UPS = 5
NUM_TIMINGS = 51  # pairs of calls; their median does not see the few that a busy machine interrupts
_TRAINING_ALONE = ("dropout", "kind_dropout", "hidden_dropout", "input_noise")  # a network that predicts has none


def parse_objectives(text: str) -> tuple[str, ...]:
    """``error,latency,size`` in that order; raises UsageError for others, repeats and a list without the error."""
    names = [name.strip() for name in text.split(",")]
    for name in names:
        if name not in OBJECTIVES:
            raise UsageError(f"unknown objective {name!r}: choose among {', '.join(OBJECTIVES)}")
        if names.count(name) > 1:
            raise UsageError(f"objective {name!r} is there twice")
    if ERROR not in names:
        raise UsageError("the error must be among the objectives: cost alone is least without a network")
    return tuple(name for name in OBJECTIVES if name in names)


@dataclass(frozen=True, kw_only=True)
class Costs:
    """Of one ensemble: networks and boosted trees."""

    latency_ratio: float | None  # time of a warm call in onnxruntime against the study's recipe; None: not measured
    size_bytes: int  # of the parameters of the networks, and of trees.onnx
    networks: str  # digest of what both depend on


class CostMeter:
    """Times exported ensembles on one graph of the corpus, always beside the ensemble of the recipe."""

    def __init__(self, corpus: Corpus, recipe: RecipeSettings, trees: Any) -> None:
        self._arrays = corpus.aware.arrays_of(median_graph(corpus))
        self._trees_bytes = export_trees(trees)
        self._recipe = recipe
        self._recipe_call: Callable[[], None] | None = None
        self._ratios = {networks_digest(recipe): 1.0}

    def costs_of(self, settings: RecipeSettings, known_ratios: Mapping[str, float] | None = None) -> Costs:
        """Costs of a trial's ensemble. ``known_ratios`` are those of earlier trials by the digest of their networks:
        equal networks have equal costs in one study then, whoever timed them. None: the latency is no objective."""
        key = networks_digest(settings)
        networks = networks_of(settings)
        weights = sum(each.numel() * each.element_size() for network in networks for each in network.parameters())
        ratio = None
        if known_ratios is not None:
            self._ratios.update({name: known for name, known in known_ratios.items() if name not in self._ratios})
            if key not in self._ratios:
                self._ratios[key] = self._ratio(settings, networks)
            ratio = self._ratios[key]
        return Costs(latency_ratio=ratio, size_bytes=weights + len(self._trees_bytes), networks=key)

    def _ratio(self, settings: RecipeSettings, networks: Sequence[StepTimeGNN]) -> float:
        if self._recipe_call is None:
            self._recipe_call = self._call_of(self._recipe, networks_of(self._recipe))
        return latency_ratio(self._call_of(settings, networks), self._recipe_call)

    def _call_of(self, settings: RecipeSettings, networks: Sequence[StepTimeGNN]) -> Callable[[], None]:
        """One answer of networks and trees in onnxruntime, as a loaded checkpoint gives it."""
        arrays = self._arrays
        model = open_session(export_onnx(networks, settings.shares_of(settings.members_of("family"))))
        trees = open_session(self._trees_bytes)
        first = np.zeros(1, np.int64)
        inputs = network_inputs(arrays, specs_known=True)
        summary = summarise_graphs(arrays.node_features, arrays.physics_ms, arrays.count, arrays.globals[None], first)

        def call() -> None:
            model.run(["op_ms", "step_ms"], inputs)
            trees.run(["log_ratio"], {"features": summary})

        return call


def networks_of(settings: RecipeSettings) -> list[StepTimeGNN]:
    """Untrained networks of the ensemble that a trial trains in each fold."""
    return [StepTimeGNN(settings.train_of(member).model).eval() for member in settings.members_of("family")]


def networks_digest(settings: RecipeSettings) -> str:
    """Equal for ensembles that predict at the same cost."""
    shapes = [
        asdict(replace(settings.train_of(member).model, **dict.fromkeys(_TRAINING_ALONE, 0.0)))
        for member in settings.members_of("family")
    ]
    return json_digest(shapes)


def median_graph(corpus: Corpus) -> int:
    """Position of the training row whose graph has the median number of nodes."""
    training = np.flatnonzero(~corpus.is_inference)
    sizes = np.diff(corpus.aware.node_start)[training]
    return int(training[np.argsort(sizes, kind="stable")[len(training) // 2]])


def latency_ratio(call: Callable[[], None], reference: Callable[[], None]) -> float:
    """Median over pairs of calls of the time of one against the other.

    Both calls of a pair run next to each other, in changing order, so that a busy machine slows both.
    """
    for _ in range(NUM_WARM_UPS):
        call()
        reference()
    ratios = []
    for i in range(NUM_TIMINGS):
        if i % 2:
            reference_s, call_s = _seconds(reference), _seconds(call)
        else:
            call_s, reference_s = _seconds(call), _seconds(reference)
        ratios.append(call_s / reference_s)
    return statistics.median(ratios)


def _seconds(call: Callable[[], None]) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started
