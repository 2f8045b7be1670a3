"""The stratified order: every beginning is balanced, nothing is lost or doubled, and it is the same every time."""

from collections import Counter

import pytest

from gnnpred.collect.order import stratified
from gnnpred.collect.recipe import Configuration, find_recipe, load_recipe
from gnnpred.errors import GnnpredError
from gnnpred.job import Phase, Precision


def sweep(models, precisions=("fp32", "mixed", "bf16", "tf32"), batches=(8,)):
    return [
        Configuration(model=f"x:{model}", batch_size=batch, precision=Precision(precision))
        for batch in batches
        for precision in precisions
        for model in models
    ]


def test_all_are_there_once_and_the_order_is_the_same_every_time():
    sweeps = [sweep("abcd", batches=(1, 2)), sweep("ef"), []]
    ordered = stratified(sweeps)
    assert Counter(ordered) == Counter(each for one in sweeps for each in one)
    assert stratified(sweeps) == ordered


def test_pairs_of_one_step_in_two_precisions_follow_each_other():
    ordered = stratified([sweep("abc"), sweep("de", batches=(1, 2))])
    for i in range(0, len(ordered), 2):
        first, second = ordered[i : i + 2]
        assert (first.model, first.batch_size) == (second.model, second.batch_size)
        assert first.precision != second.precision


def test_every_beginning_is_balanced_over_sweeps_models_and_precisions():
    sweeps = [sweep("abcdefgh"), sweep("ijkl"), sweep("mnop")]
    ordered = stratified(sweeps)
    sizes = [len(each) for each in sweeps]
    for end in range(8, len(ordered), 4):
        done = ordered[:end]
        of_sweep = [sum(each in one for each in done) for one in (set(each) for each in sweeps)]
        assert all(abs(n / size - end / len(ordered)) <= 4 / size for n, size in zip(of_sweep, sizes, strict=True))
        uses = Counter(each.model for each in done)
        assert max(uses.values()) - min(uses[each.model] for each in ordered) <= 4
        precisions = Counter(each.precision for each in done)
        assert max(precisions.values()) - min(precisions.values()) <= 2


def test_a_sweep_of_few_comes_in_its_turn_not_first():
    ordered = stratified([sweep("abcdefghij"), sweep("z", precisions=("fp64", "fp32"))])
    at = [i for i in range(len(ordered)) if ordered[i].model == "x:z"]
    assert at[1] == at[0] + 1
    assert 10 <= at[0] <= 32


# ------------------------------------------------------------------------- recipes

SWEEP = '[[sweep]]\nmodels = ["timm:a", "timm:b"]\nbatch_sizes = [1]\nprecisions = ["fp32", "mixed"]\n'


def load(tmp_path, text):
    path = tmp_path / "mine.toml"
    path.write_text(text)
    return load_recipe(path)


def test_a_sample_is_the_beginning_of_the_stratified_order(tmp_path):
    whole = load(tmp_path, 'order = "stratified"\n' + SWEEP).configurations
    assert [each.model for each in whole] == ["timm:a", "timm:a", "timm:b", "timm:b"]
    assert load(tmp_path, 'order = "stratified"\nsample = 3\n' + SWEEP).configurations == whole[:3]
    listed = load(tmp_path, 'order = "listed"\n' + SWEEP).configurations
    assert [each.model for each in listed] == ["timm:a", "timm:b"] * 2


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('order = "stratifed"\n', ("'stratifed' is unknown", "did you mean 'stratified'?")),
        ("sample = 2\n", ("sample takes the beginning of", "stratified")),
        ('order = "stratified"\nsample = 5\n', ("from 1 to 4", "got 5")),
        ('order = "stratified"\nsample = true\n', ("whole number",)),
        ('order = "stratified"\nsample = 0\n', ("got 0",)),
        ("order = 3\n", ("order", "3")),
    ],
)
def test_what_is_wrong_with_an_order_is_named(tmp_path, text, words):
    with pytest.raises(GnnpredError) as raised:
        load(tmp_path, text + SWEEP)
    assert all(word in str(raised.value) for word in ("mine.toml", *words)), raised.value


@pytest.fixture(scope="module")
def h200():
    return load_recipe(find_recipe("h200-12min"))


def test_the_twelve_minutes_hold_what_they_promise(h200):
    configurations = h200.configurations
    assert len(configurations) >= 400
    assert len({each.model for each in configurations}) >= 80
    of_precision = Counter(each.precision for each in configurations)
    assert set(of_precision) == set(Precision)
    assert all(of_precision[each] >= 50 for each in Precision if each is not Precision.FP64)
    assert of_precision[Precision.FP64] <= 8
    assert {each.phase for each in configurations} == set(Phase)
    assert {each.optimizer for each in configurations} == {"sgd", "adam", "adamw", "none"}
    assert {each.memory_format for each in configurations} == {"nchw", "nhwc"}
    assert {each.host_copy for each in configurations} >= {"none", "pinned"}
    assert 1 <= sum(each.compile for each in configurations) <= 4
    assert {each.model.split(":")[0] for each in configurations} == {"timm", "torchvision", "hf"}
    assert len({each.image_size for each in configurations}) >= 3
    assert len({each.seq_len for each in configurations}) >= 5
    assert len({each.batch_size for each in configurations}) >= 6
    # steps alone, at the caps of one configuration: warm-up, timed steps and power
    settings = h200.measure
    longest_s = settings.max_warmup_s + max(settings.max_timed_s, settings.min_energy_s)
    assert len(configurations) * longest_s < 0.5 * 720


@pytest.mark.parametrize("num", [24, 50, 100, 200, 300])
def test_the_twelve_minutes_are_of_use_wherever_they_are_cut_off(h200, num):
    done = h200.configurations[:num]
    assert len({each.model for each in done}) >= min(100, 0.4 * num)
    precisions = Counter(each.precision for each in done)
    shares = [precisions[each] / num for each in Precision if each is not Precision.FP64]
    assert min(shares) > 0.1
    assert max(shares) < 0.25
    assert {each.model.split(":")[0] for each in done} == {"timm", "torchvision", "hf"}
    images, text = (sum(each.model.startswith("hf") == is_text for each in done) for is_text in (False, True))
    assert 0.2 < text / images < 0.6
    # pairs: what precision alone does shows in nearly all
    by_step = Counter((each.model, each.batch_size, each.image_size, each.seq_len, each.phase, each.optimizer,
                       each.memory_format, each.compile, each.host_copy) for each in done)  # fmt: skip
    assert sum(count for count in by_step.values() if count >= 2) >= 0.9 * num
