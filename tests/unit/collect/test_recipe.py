"""Recipes are read strictly: what is wrong is named, with the nearest right word."""

import pytest

from gnnpred.collect.recipe import find_recipe, load_recipe, recipes_folder
from gnnpred.errors import GnnpredError
from gnnpred.job import Phase, Precision

SWEEP = '[[sweep]]\nmodels = ["torchvision:alexnet"]\nbatch_sizes = [1]\n'


def load(tmp_path, text):
    path = tmp_path / "mine.toml"
    path.write_text(text)
    return load_recipe(path)


def test_a_sweep_is_every_combination_with_models_varying_fastest(tmp_path):
    recipe = load(
        tmp_path,
        '[[sweep]]\nmodels = ["timm:a", "timm:b"]\nbatch_sizes = [1, 2]\nprecisions = ["fp32", "amp"]\n',
    )
    assert [(c.batch_size, c.precision, c.model) for c in recipe.configurations] == [
        (batch, precision, model)
        for batch in (1, 2)
        for precision in (Precision.FP32, Precision.MIXED)
        for model in ("timm:a", "timm:b")
    ]


def test_configurations_that_two_sweeps_name_are_measured_once(tmp_path):
    assert len(load(tmp_path, SWEEP + SWEEP).configurations) == 1


def test_optimizers_multiply_training_alone(tmp_path):
    recipe = load(tmp_path, SWEEP + 'phases = ["train", "inference"]\noptimizers = ["sgd", "adam"]\n')
    assert [(c.phase, c.optimizer) for c in recipe.configurations] == [
        (Phase.TRAIN, "sgd"), (Phase.INFERENCE, "none"), (Phase.TRAIN, "adam"),
    ]  # fmt: skip


def test_gpus_and_strategies_multiply_what_exchanges_gradients(tmp_path):
    recipe = load(
        tmp_path,
        SWEEP + 'gpus = [1, 2, 4]\nnodes = [1, 2]\nstrategies = ["ddp", "fsdp"]\nphases = ["train", "inference"]\n',
    )
    assert [(c.phase, c.gpus, c.nodes, c.strategy) for c in recipe.configurations] == [
        (Phase.TRAIN, 1, 1, ""), (Phase.INFERENCE, 1, 1, ""),
        *((Phase.TRAIN, 2, nodes, strategy) for nodes in (1, 2) for strategy in ("ddp", "fsdp")),
        *((Phase.TRAIN, 4, nodes, strategy) for nodes in (1, 2) for strategy in ("ddp", "fsdp")),
    ]  # fmt: skip


def test_comments_do_not_make_another_recipe_and_steps_do(tmp_path):
    plain = load(tmp_path, SWEEP)
    assert load(tmp_path, "# a comment\n" + SWEEP).recipe_id == plain.recipe_id
    assert load(tmp_path, "[measure]\nsteps = 7\n" + SWEEP).recipe_id != plain.recipe_id


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (SWEEP + 'precision = ["fp32"]\n', ("[[sweep]] 1", "'precision'", "did you mean 'precisions'?")),
        ("mesure = 1\n" + SWEEP, ("'mesure'", "did you mean 'measure'?")),
        ("[measure]\nstep = 3\n" + SWEEP, ("[measure]", "'step'", "did you mean 'steps'?")),
        ("[measure]\nsteps = 0\n" + SWEEP, ("[measure]", "steps must be above 0")),
        ("[measure]\nsteps = true\n" + SWEEP, ("steps must be of type int",)),
        ("[measure]\nmax_warmup_steps = 1\n" + SWEEP, ("below min_warmup_steps",)),
        (SWEEP + 'precisions = ["fp23"]\n', ("unknown precision 'fp23'", "did you mean 'fp32'?")),
        (SWEEP + 'optimizers = ["adamv"]\n', ("'adamv'", "did you mean 'adam'?")),
        (SWEEP + 'phases = ["trian"]\n', ("'trian'", "did you mean 'train'?")),
        (SWEEP + 'strategies = ["fdsp"]\n', ("'fdsp'", "did you mean 'fsdp'?")),
        (SWEEP + "gpus = [1, 3]\nnodes = [2]\n", ("no number of gpus [1, 3] can be spread evenly over [2] nodes",)),
        (SWEEP + "image_sizes = [0]\n", ("image_sizes must be at least 1",)),
        (SWEEP + "compile = [1]\n", ("compile holds 1", "bool")),
        (SWEEP + "seq_lens = 128\n", ("seq_lens must be a list",)),
        ('[[sweep]]\nbatch_sizes = [1]\nmodels = ["resnet18"]\n', ("cannot read the model 'resnet18'",)),
        ("[[sweep]]\nbatch_sizes = [1]\n", ("models is missing",)),
        ("", ("at least one table [[sweep]]",)),
        ("[[sweep", ("not valid TOML",)),
    ],
)
def test_what_is_wrong_with_a_recipe_is_named(tmp_path, text, words):
    with pytest.raises(GnnpredError) as raised:
        load(tmp_path, text)
    assert all(word in str(raised.value) for word in ("mine.toml", *words)), raised.value


def test_shipped_recipes_are_found_by_name_and_readable():
    names = sorted(path.stem for path in recipes_folder().glob("*.toml"))
    assert names == ["language", "precision-contrast", "smoke", "vision"]
    assert all(load_recipe(find_recipe(name)).configurations for name in names)


def test_the_precision_contrast_holds_every_model_in_every_precision():
    recipe = load_recipe(find_recipe("precision-contrast"))
    for model in {each.model for each in recipe.configurations}:
        assert {each.precision for each in recipe.configurations if each.model == model} == set(Precision)


def test_an_unknown_recipe_name_lists_the_shipped_ones():
    with pytest.raises(GnnpredError, match=r"not found.*smoke"):
        find_recipe("smok")
