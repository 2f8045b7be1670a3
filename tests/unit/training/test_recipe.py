"""Recipe files."""

import pytest

pytest.importorskip("torch_geometric")

from gnnpred.errors import GnnpredError, UsageError
from gnnpred.training.recipe import find_recipe, load_recipe, recipe_text, shipped_recipes, values_of, with_values

pytestmark = pytest.mark.train


def test_every_shipped_recipe_loads():
    recipes = shipped_recipes()
    assert {"base", "smoke"} <= {path.stem for path in recipes}
    for path in recipes:
        assert load_recipe(path).train.epochs >= 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[train]\nepoch = 3", r"\[train\]: unknown field 'epoch', did you mean 'epochs'"),
        ("seeds = 0", "seeds must be at least 1"),
        ('seeds = "3"', "seeds must be of type int"),
        ("[train]\nlearning_rate = -1.0", "must not be negative"),
        ("train = 3", "train must be a table"),
        ("seeds = ", "not valid TOML"),
    ],
)
def test_a_wrong_recipe_is_refused_with_the_field_named(tmp_path, text, message):
    path = tmp_path / "r.toml"
    path.write_text(text)
    with pytest.raises(GnnpredError, match=message):
        load_recipe(path)


def test_an_unknown_recipe_names_the_shipped_ones():
    with pytest.raises(UsageError, match="base"):
        find_recipe("no-such-recipe")


def test_a_written_recipe_reads_back_equal(tmp_path):
    settings = load_recipe(find_recipe("base"))
    changed = {"train.learning_rate": 1e-05, "train.model.width": 48, "train.model.pooled_scale": True, "seeds": 4}
    settings = with_values(settings, changed, where="test")
    assert values_of(settings)["train.model.width"] == 48
    (tmp_path / "r.toml").write_text(recipe_text(settings, comment="of a test\ntwo lines"))
    assert load_recipe(tmp_path / "r.toml") == settings
