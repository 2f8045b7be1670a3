"""Networks of our own have the number of parameters that their source published, and batch axes throughout."""

from collections import Counter
from importlib.util import find_spec

import pytest

pytest.importorskip("torch")
if find_spec("timm") is None or find_spec("torchvision") is None or find_spec("transformers") is None:
    pytest.skip("needs the models extra", allow_module_level=True)

from gnnpred.corpus.networks_language import NETWORKS as LANGUAGE_NETWORKS
from gnnpred.corpus.rebuild import OPTION_NETWORKS, ModelKey, defining_file, trace_key
from gnnpred.corpus.sources.language_models import mpt_source
from gnnpred.corpus.sources.suites import TRANSFORMER_XL_BASE
from gnnpred.op_kinds import OP_KINDS
from gnnpred.passes.canonical import canonicalise

pytestmark = pytest.mark.models


@pytest.mark.parametrize(
    ("source", "seq_len", "published"),
    [
        ("own:neumf_ml20m", None, 31_832_577),  # printed by NVIDIA's NCF for ml-20m
        (TRANSFORMER_XL_BASE, 192, 192e6),  # NVIDIA's page: 192 M
        ("own:transformer_big", 28, 210e6),  # Vaswani et al. 2017: 213 M, with a vocabulary of 37,000
        ("own:jasper", 320, 333e6),  # Li et al. 2019: 333 M
        ("own:gnmt_v2", 25, 160e6),  # MLPerf training: 160 M
        ("own:tacotron2?num_frames=860", 180, 28_193_153),  # printed by NVIDIA's Tacotron 2
        ("own:inception_bn", None, 11_295_240),  # batch-normalised Inception, convolutions with bias
        ("own:mask_rcnn?height=800&width=1216", None, 44.2e6),  # torchvision: 44.4 M with 91 classes and frozen layers
    ],
)
def test_networks_have_their_published_size(source, seq_len, published):
    graph = trace_key(ModelKey(source, seq_len=seq_len))
    exact = isinstance(published, int)
    assert graph.num_parameters == pytest.approx(published, rel=0 if exact else 0.01)
    assert all(graph.tensors[idx].batch_axes for idx in (*graph.inputs, *graph.outputs))
    assert {op.kind for op in canonicalise(graph).ops} <= set(OP_KINDS)


@pytest.mark.parametrize(
    ("model", "seq_len", "published", "vocab"),
    [("mpt-125m", 1024, 124_439_808, 50_257), ("mpt-125m", 16_384, 136_321_536, 50_368)],
)
def test_mpt_has_the_size_that_its_table_prints_for_either_vocabulary(model, seq_len, published, vocab):
    source = mpt_source(model, published, seq_len)
    assert source.endswith(f"vocab={vocab}")
    assert trace_key(ModelKey(source, seq_len=seq_len)).num_parameters == published


@pytest.mark.parametrize(("model", "published"), [("mpt-7b", 6_658_859_008), ("mpt-70b", 64_862_437_376)])
def test_parameters_of_large_mpts_follow_from_their_layers(model, published):
    assert mpt_source(model, published, 2048).endswith("vocab=50368")
    assert mpt_source(model, published - 111 * {"mpt-7b": 4096, "mpt-70b": 8192}[model], 2048).endswith("vocab=50257")


def test_a_decoder_loop_is_one_body_that_repeats():
    graph = trace_key(ModelKey("own:tacotron2?num_frames=860", seq_len=180))
    assert Counter(op.repeats for op in graph.ops if op.kind == "lstm") == {1: 1, 860: 2}
    assert {op.repeats for op in graph.ops if op.kind == "batch_norm"} == {1}


def test_every_file_of_networks_is_found_by_its_own_models():
    assert set(LANGUAGE_NETWORKS) < set(OPTION_NETWORKS)
    assert defining_file(ModelKey("own:mpt?layers=1")) == "networks_language.py"
    assert defining_file(ModelKey("own:lenet5")) == "networks.py"
