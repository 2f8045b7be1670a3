"""Search space files: what they may say, and the line that says what is wrong."""

import pytest

pytest.importorskip("torch_geometric")

from gnnpred.errors import GnnpredError
from gnnpred.training.recipe import find_recipe, load_recipe, values_of, with_values
from gnnpred.training.search_space import default_space, load_space

pytestmark = pytest.mark.train
STUDY = """
[study]
test_fold = 0
seed = 0
startup_trials = 1
stages = [{ rows = 0.5, epochs = 0.25, keep = 0.5 }, { rows = 1.0, epochs = 1.0 }]
"""
RATE = '"train.learning_rate" = { kind = "float", low = 1e-3, high = 1e-2, log = true }'


def write(tmp_path, parameters: str, study: str = STUDY):
    path = tmp_path / "space.toml"
    path.write_text(f"{study}\n[parameters]\n{parameters}\n")
    return path


@pytest.mark.parametrize("name", ["base", "smoke"])
def test_the_shipped_spaces_hold_the_defaults_of_their_recipes(name):
    recipe = load_recipe(find_recipe(name))
    space = load_space(default_space(name), recipe)
    defaults = space.defaults(recipe)
    assert all(defaults[parameter.name] == values_of(recipe)[parameter.name] for parameter in space.parameters)
    assert with_values(recipe, defaults, where="test") == recipe
    assert all(parameter.admits(defaults[parameter.name]) for parameter in space.parameters)


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ('"train.learning_rat" = { kind = "float", low = 1e-3, high = 1e-2 }', "did you mean 'train.learning_rate'"),
        ('"train.learning_rate" = { kind = "float", low = 1e-2, high = 1e-3 }', "'train.learning_rate': empty range"),
        ('"train.model.width" = { kind = "int", low = 80, high = 80 }', "'train.model.width': empty range"),
        ('"train.graphs_per_batch" = { kind = "categorical", choices = [] }', "graphs_per_batch': empty range"),
        ('"train.learning_rate" = { kind = "float", low = 0.1, high = 1.0 }', "own value 0.004 is not among 0.1 to 1"),
        ('"train.model.width" = { kind = "int", low = 60, high = 100, step = 8 }', "own value 80 is not among"),
        ('"train.model.width" = { kind = "int", low = 48, high = 100, step = 16 }', "whole number of steps of 16"),
        ('"train.model.width" = { kind = "float", low = 1.0, high = 99.0 }', "kind must be int"),
        ('"train.model.width" = { kind = "int", low = 0, high = 99 }', "width must be at least 1"),
        ('"train.model.dropout" = { kind = "float", low = 0.0, high = 1.5 }', "dropout must be at most 1"),
        ('"train.model.pooled_scale" = { kind = "int", low = 0, high = 1 }', "kind must be categorical"),
        ('"train.model.width" = { kind = "int", low = "a", high = 99 }', "low must be of type int"),
        ('"train.model.width" = { kind = "uniform" }', "kind must be one of float, int, categorical"),
        ('"train.weight_decay" = { kind = "float", low = 0.0, high = 1.0, log = true }', "needs low above 0"),
        ('"train.graphs_per_batch" = { kind = "categorical", choices = [32, "64"] }', "type int, got '64'"),
        ('"seeds" = { kind = "int", low = 1, high = 4 }', "'seeds' cannot be searched"),
        ('train.learning_rate = { kind = "float", low = 1e-3, high = 1e-2 }', "dotted names in quotes"),
        (RATE.replace("low =", "lowest ="), "unknown field 'lowest', did you mean 'low'"),
        ("", "needs the tables"),
    ],
)
def test_a_wrong_parameter_is_refused_by_name(tmp_path, parameters, message):
    recipe = load_recipe(find_recipe("base"))
    with pytest.raises(GnnpredError, match=message):
        load_space(write(tmp_path, parameters), recipe)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("test_fold = 0", "test_fold = -1", "test_fold must be a whole number"),
        ("seed = 0", "", "seed is missing"),
        ("keep = 0.5", "keep = 0", "keep of a stage must be above 0 and at most 1, got 0"),
        (", keep = 0.5", "", "keep of a stage must be above 0 and at most 1, got None"),
        ("epochs = 1.0 }", "epochs = 1.0, keep = 0.5 }", "no stage follows the last one: leave keep out there"),
        ("epochs = 1.0 }", "epochs = 0.5 }", "the last stage must be the whole recipe"),
        ("rows = 1.0", "rows = 2.0", "rows of a stage must be above 0 and at most 1"),
        ("seed = 0", "sed = 0", "unknown field 'sed', did you mean 'seed'"),
    ],
)
def test_a_wrong_study_table_is_refused_by_name(tmp_path, old, new, message):
    recipe = load_recipe(find_recipe("base"))
    with pytest.raises(GnnpredError, match=message):
        load_space(write(tmp_path, RATE, STUDY.replace(old, new)), recipe)


def test_a_change_of_the_space_changes_its_digest(tmp_path):
    recipe = load_recipe(find_recipe("base"))
    one = load_space(write(tmp_path, RATE), recipe).digest
    assert one == load_space(write(tmp_path, RATE + "  # the same"), recipe).digest
    assert one != load_space(write(tmp_path, RATE.replace("1e-2", "2e-2")), recipe).digest
    assert one != load_space(write(tmp_path, RATE, STUDY.replace("test_fold = 0", "test_fold = 1")), recipe).digest
