"""The order in which a recipe is measured, where its sweeps are to go side by side."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, replace

from gnnpred.collect.recipe import Configuration
from gnnpred.job import Precision

_TOGETHER = 2  # precisions of one step that follow each other: what precision does shows in pairs


def stratified(sweeps: Sequence[Sequence[Configuration]]) -> list[Configuration]:
    """All configurations, so that every beginning is balanced over sweeps, models, precisions and all else.

    The next ones are of the sweep that has the smallest share done, there of the model measured least so far, of that
    the step whose batch size, phase, optimizer ... are least used, in two precisions of which the smallest share is
    done. Equal ones go in the recipe's order.
    """
    strata = [_Stratum(each) for each in sweeps if each]
    num_of_precision = Counter(each.precision for sweep in sweeps for each in sweep)
    model_uses: Counter[str] = Counter()
    precision_uses: Counter[Precision] = Counter()
    value_uses: Counter[tuple[str, object]] = Counter()
    ordered: list[Configuration] = []
    while open_strata := [stratum for stratum in strata if stratum.num_left]:
        # half of the pair counts as done: a small sweep does not come first, but when its turn is
        stratum = min(open_strata, key=lambda each: (each.num - each.num_left + _TOGETHER / 2) / each.num)
        model = min(stratum.steps_of_model, key=lambda each: model_uses[each])
        steps = stratum.steps_of_model[model]
        step = min(steps, key=lambda each: sum(value_uses[value] for value in _values_of(each)))
        left = steps[step]
        chosen = sorted(left, key=lambda each: precision_uses[each.precision] / num_of_precision[each.precision])
        for configuration in chosen[:_TOGETHER]:
            left.remove(configuration)
            stratum.num_left -= 1
            model_uses[model] += 1
            precision_uses[configuration.precision] += 1
            value_uses.update(_values_of(step))
            ordered.append(configuration)
        if not left:
            del steps[step]
        if not steps:
            del stratum.steps_of_model[model]
    return ordered


class _Stratum:
    """What is left of one sweep: model -> step (precision aside) -> configurations."""

    def __init__(self, configurations: Sequence[Configuration]) -> None:
        self.num = self.num_left = len(configurations)
        self.steps_of_model: dict[str, dict[Configuration, list[Configuration]]] = {}
        for each in configurations:
            steps = self.steps_of_model.setdefault(each.model, {})
            steps.setdefault(replace(each, precision=Precision.FP32), []).append(each)


def _values_of(step: Configuration) -> list[tuple[str, object]]:
    return [(name, value) for name, value in asdict(step).items() if name not in ("model", "precision")]
