"""Models by name: what is built, and what is said where it cannot be."""

import json

import pytest

torch = pytest.importorskip("torch")

from gnnpred.errors import GnnpredError, UsageError  # noqa: E402
from gnnpred.model_sources import build_model, declare_torchvision_ops  # noqa: E402

declare_torchvision_ops()

pytestmark = pytest.mark.models


@pytest.fixture
def timm():
    return pytest.importorskip("timm")


@pytest.fixture
def torchvision():
    return pytest.importorskip("torchvision")


@pytest.fixture
def transformers():
    return pytest.importorskip("transformers")


def devices(module):
    return {tensor.device.type for tensor in (*module.parameters(), *module.buffers())}


def test_a_timm_model_is_in_train_mode_on_the_meta_device_at_its_own_image_size(timm):
    module, inputs = build_model("timm:resnet18", batch_size=3)
    assert module.training
    assert devices(module) == {"meta"}
    assert [tuple(x.shape) for x in inputs] == [(3, 3, 224, 224)]


@pytest.mark.parametrize("name", ["vit_tiny_patch16_224", "resnet18"])
def test_another_image_size_reaches_models_that_are_built_for_one(timm, name):
    module, inputs = build_model(f"timm:{name}", image_size=96)
    assert tuple(inputs[0].shape) == (2, 3, 96, 96)
    assert module(*inputs).shape == (2, 1000)


def test_number_of_classes_and_constructor_options_are_handed_on(timm):
    module, _ = build_model("timm:resnet18", num_classes=7, model_options={"drop_rate": 0.25})
    assert (module.num_classes, module.drop_rate) == (7, 0.25)


def test_a_torchvision_model_and_its_image_size(torchvision):
    module, inputs = build_model("torchvision:inception_v3")
    assert tuple(inputs[0].shape) == (2, 3, 299, 299)
    assert devices(module) == {"meta"}


@pytest.mark.parametrize("name", ["llama", "LlamaForCausalLM"])
def test_a_transformers_model_of_given_sizes(transformers, name):
    source = f"hf:{name}?hidden_size=64&num_hidden_layers=2&intermediate_size=128&num_attention_heads=4&vocab_size=100"
    module, inputs = build_model(source, seq_len=16)
    assert module(*inputs).shape == (2, 16, 100)
    assert len(module.model.model.layers) == 2


def test_a_transformers_model_of_a_configuration_file(transformers, tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps({
        "model_type": "bert", "architectures": ["BertForSequenceClassification"], "hidden_size": 32,
        "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64, "vocab_size": 50,
    }))  # fmt: skip
    module, inputs = build_model(f"hf:{path}", seq_len=8, num_classes=3)
    assert type(module.model).__name__ == "BertForSequenceClassification"
    assert module(*inputs).shape == (2, 3)


def test_an_encoder_decoder_gets_both_inputs(transformers):
    module, inputs = build_model("hf:t5?d_model=32&num_layers=1&num_heads=2&d_ff=64&d_kv=16&vocab_size=50", seq_len=8)
    assert [tuple(x.shape) for x in inputs] == [(2, 8), (2, 8)]
    assert module(*inputs).shape == (2, 8, 50)


def test_a_users_own_function_by_module_and_by_file(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(
        "import torch\n"
        "def net(batch_size=1):\n    return torch.nn.Linear(4, 2), torch.zeros(batch_size, 4)\n"
        "def wrong():\n    return 3\n"
        "def broken():\n    raise ValueError('no such file')\n"
    )
    module, inputs = build_model(f"{path}:net", batch_size=5)
    assert devices(module) == {"meta"}
    assert tuple(inputs[0].shape) == (5, 4)
    assert build_model("tests.helpers.small_models:norms").module.training
    with pytest.raises(GnnpredError, match=r"must return \(module, example_inputs\), got int"):
        build_model(f"{path}:wrong")
    with pytest.raises(GnnpredError, match="ValueError: no such file"):
        build_model(f"{path}:broken")
    with pytest.raises(GnnpredError, match="no function 'nett'; nearest: net"):
        build_model(f"{path}:nett")


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("timm:resnet5o", "timm has no model 'resnet5o'; nearest names: resnet50"),
        ("torchvision:resnt50", "nearest names: resnet50, "),
        ("torchvision:fasterrcnn_resnet50_fpn", "data-dependent"),
        ("hf:llamma", "nearest names: llama"),
        ("hf:LlamaForCausalLm", "nearest names: LlamaForCausalLM"),
        ("hf:no/such/config.json", "cannot read the model configuration"),
        ("hf:llama?hidden_size=big", "sizes do not make a configuration"),
    ],
)
def test_an_unknown_model_is_one_line_with_the_nearest_names(timm, torchvision, transformers, source, message):
    with pytest.raises(GnnpredError) as caught:
        build_model(source)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("source", ["resnet50", "tim:resnet50", ":x", "timm:"])
def test_an_unknown_form_of_source_lists_the_forms(source):
    with pytest.raises(UsageError, match="timm:NAME, torchvision:NAME"):
        build_model(source)


def test_a_configuration_without_a_model_type_is_refused(transformers, tmp_path):
    path = tmp_path / "config.json"
    path.write_text("{}")
    with pytest.raises(GnnpredError, match="names no model_type"):
        build_model(f"hf:{path}")
    path.write_text("{")
    with pytest.raises(GnnpredError, match="not a JSON"):
        build_model(f"hf:{path}")


def test_a_missing_package_names_the_extra(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "timm", None)
    with pytest.raises(GnnpredError, match=r"pip install 'gnnpred\[models\]'"):
        build_model("timm:resnet18")
