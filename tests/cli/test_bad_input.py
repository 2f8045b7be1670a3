"""Bad input: one clear line, exit 1 for a file and 2 for options, never a traceback."""

import pytest
from onnx import TensorProto, helper

from tests.helpers.onnx_files import model_of, save, small_cnn, value, weight


def not_onnx(folder):
    path = folder / "model.onnx"
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + bytes(range(256)) * 4)
    return path


def empty_file(folder):
    path = folder / "model.onnx"
    path.write_bytes(b"")
    return path


def truncated(folder):
    path = folder / "model.onnx"
    content = small_cnn().SerializeToString()
    path.write_bytes(content[: len(content) // 2])
    return path


def a_folder(folder):
    return folder


def absent(folder):
    return folder / "absent.onnx"


def empty_graph(folder):
    return save(model_of([], [value("x", ["batch", 4])], [value("x", ["batch", 4])]), folder)


def cyclic(folder):
    nodes = [
        helper.make_node("Add", ["x", "b"], ["a"], name="first"),
        helper.make_node("Relu", ["a"], ["b"], name="second"),
    ]
    return save(model_of(nodes, [value("x", ["batch", 4])], [value("b", ["batch", 4])]), folder)


def missing_opset_import(folder):
    model = small_cnn()
    node = model.graph.node.add(op_type="Frobnicate", domain="com.example", name="alien")
    node.input.append("y")
    node.output.append("z")
    del model.opset_import[:]
    return save(model, folder)


def unknown_dtype(folder):
    model = small_cnn()
    model.graph.input[0].type.tensor_type.elem_type = 97
    return save(model, folder)


def unknown_weight_dtype(folder):
    model = small_cnn()
    model.graph.initializer[0].data_type = 97
    return save(model, folder)


def escaping_external_data(folder):
    model = small_cnn()
    tensor = model.graph.initializer[0]
    tensor.ClearField("raw_data")
    tensor.data_location = TensorProto.EXTERNAL
    tensor.external_data.add(key="location", value="../../../etc/passwd")
    return save(model, folder)


def unresolved_dimension(folder):
    nodes = [helper.make_node("MatMul", ["x", "w"], ["y"])]
    inputs = [value("x", ["batch", "length", 64])]
    return save(model_of(nodes, inputs, [value("y", ["batch", "length", 64])], [weight("w", [64, 64])]), folder)


def absurd_weight(folder):
    model = small_cnn()
    model.graph.initializer[1].ClearField("raw_data")
    model.graph.initializer[1].dims[:] = [2**40, 2**40]
    return save(model, folder)


def negative_weight_dimension(folder):
    model = small_cnn()
    model.graph.initializer[1].dims[:] = [-10, 16]
    return save(model, folder)


def absent_input(folder):
    nodes = [helper.make_node("Relu", ["nowhere"], ["y"], name="lost")]
    return save(model_of(nodes, [value("x", ["batch", 4])], [value("y", ["batch", 4])]), folder)


BAD_FILES = [
    (not_onnx, "model.onnx"),
    (empty_file, "model.onnx"),
    (truncated, "model.onnx"),
    (a_folder, ""),
    (absent, "absent.onnx"),
    (empty_graph, ""),
    (cyclic, "first|second|cycl"),
    (missing_opset_import, "opset"),
    (unknown_dtype, "97|type"),
    (unknown_weight_dtype, "97|type"),
    (escaping_external_data, "outside|escape|passwd"),
    (unresolved_dimension, "length"),
    (absurd_weight, "elements|large"),
    (negative_weight_dimension, "negative|dimension"),
    (absent_input, "nowhere"),
]


@pytest.mark.parametrize("command", ["predict", "inspect"])
@pytest.mark.parametrize(("make", "pattern"), BAD_FILES, ids=[make.__name__ for make, _ in BAD_FILES])
def test_a_bad_file_is_one_line_and_exit_1(gnnpred, tmp_path, make, pattern, command):
    import re

    outcome = gnnpred(command, make(tmp_path), "--batch-size", 4)
    assert outcome.code == 1, outcome
    assert outcome.is_one_error_line(), outcome
    assert re.search(pattern, outcome.err), outcome.err
    assert outcome.out == ""


def test_missing_external_data_is_fine(gnnpred, tmp_path):
    model = small_cnn()
    for tensor in model.graph.initializer:
        tensor.ClearField("raw_data")
        tensor.data_location = TensorProto.EXTERNAL
        tensor.external_data.add(key="location", value="weights_that_are_not_here.bin")
    outcome = gnnpred("predict", save(model, tmp_path), "--batch-size", 4, "--json")
    assert outcome.code == 0, outcome.err


BAD_OPTIONS = [
    (("--batch-size", "0"), "batch size"),
    (("--batch-size", "-3"), "batch size"),
    (("--batch-size", "many"), "--batch-size"),
    (("--device", "A100-SXM9"), "did you mean A100-"),
    (("--device", ""), "device"),
    (("--device", "V100", "--device-file", "x.toml"), "exclude each other"),
    (("--precision", "fp12"), "unknown precision 'fp12'"),
    (("--precision", "bf16", "--device", "V100"), "no bf16 units"),
    (("--precision", "amp_bf16", "--device", "T4"), "use --precision mixed"),
    (("--gpus", "6", "--nodes", "4"), "divisible"),
    (("--gpus", "0"), "at least 1"),
    (("--gpus", "2", "--nodes", "-1"), "at least 1"),
    (("--phase", "sleep"), "unknown phase"),
    (("--optimizer", "sdg"), "unknown optimizer"),
    (("--memory-format", "nchwc"), "unknown memory format"),
    (("--strategy", "magic"), "unknown strategy"),
    (("--gpus", "8", "--interconnect", "string"), "string"),
    (("--gpus", "8", "--nodes", "2", "--inter-node", "pigeons"), "pigeons"),
    (("--compile", "--compiler", "xla"), "excludes"),
    (("--compiler", "tvm"), "unknown compiler"),
    (("--activation-rule", "some"), "unknown activation rule"),
    (("--dim", "length"), "NAME=VALUE"),
    (("--dim", "length=long"), "not a whole number"),
    (("--dim", "length=0"), "at least 1"),
    (("--batch-siz", "4"), "--batch-siz"),
    (("surplus",), "surplus"),
]


@pytest.mark.parametrize(("options", "text"), BAD_OPTIONS, ids=[" ".join(options) for options, _ in BAD_OPTIONS])
def test_a_bad_option_is_one_line_and_exit_2(gnnpred, cnn, options, text):
    arguments = options if "--batch-size" in options else ("--batch-size", "4", *options)
    outcome = gnnpred("predict", cnn, *arguments)
    assert outcome.code == 2, outcome
    assert outcome.is_one_error_line(), outcome
    assert text in outcome.err


def test_an_absurd_batch_is_refused(gnnpred, cnn):
    outcome = gnnpred("predict", cnn, "--batch-size", 10**17)
    assert outcome.code in (1, 2)
    assert outcome.is_one_error_line(), outcome


def test_no_argument_and_an_unknown_command_are_one_line(gnnpred):
    for arguments in (("predict",), ("predicted", "x.onnx")):
        outcome = gnnpred(*arguments)
        assert outcome.code == 2
        assert outcome.is_one_error_line(), outcome


def test_an_unknown_checkpoint_names_what_there_is(capsys):
    from gnnpred.cli import run

    assert run(["predict", "x.onnx", "--checkpoint", "nosuch"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: checkpoint 'nosuch' not found")
    assert error.count("\n") == 1


def test_debug_shows_the_traceback(gnnpred, tmp_path):
    from gnnpred.errors import GnnpredError

    with pytest.raises(GnnpredError):
        gnnpred("predict", not_onnx(tmp_path), "--debug")


def test_an_error_of_ours_is_one_line_that_mentions_debug(gnnpred, cnn, monkeypatch):
    def broken(*_, **__):
        raise ZeroDivisionError("a bug\nover two lines")

    monkeypatch.setattr("gnnpred.predictor.predict", broken)
    outcome = gnnpred("predict", cnn)
    assert outcome.code == 1
    assert outcome.is_one_error_line(), outcome
    assert "--debug" in outcome.err


def test_an_interrupt_exits_with_130(gnnpred, cnn, monkeypatch):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("gnnpred.predictor.predict", interrupted)
    assert gnnpred("predict", cnn).code == 130


def test_an_inference_export_is_predicted_with_a_warning(gnnpred, tmp_path):
    nodes, weights, last = [], [], "x"
    for i in range(12):
        weights += [weight(f"w{i}", [16, 16, 3, 3]), weight(f"b{i}", [16])]
        nodes += [
            helper.make_node("Conv", [last, f"w{i}", f"b{i}"], [f"c{i}"], pads=[1, 1, 1, 1]),
            helper.make_node("Relu", [f"c{i}"], [f"r{i}"]),
        ]
        last = f"r{i}"
    model = model_of(nodes, [value("x", ["batch", 16, 8, 8])], [value(last, ["batch", 16, 8, 8])], weights)
    outcome = gnnpred("predict", save(model, tmp_path), "--batch-size", 4, "--json")
    assert outcome.code == 0, outcome.err
    assert any("inference export" in warning for warning in outcome.json["warnings"])


def test_a_deep_chain_neither_overflows_the_stack_nor_takes_long(gnnpred, tmp_path):
    nodes = [helper.make_node("Relu", [f"t{i}"], [f"t{i + 1}"]) for i in range(5000)]
    model = model_of(nodes, [value("t0", ["batch", 4])], [value("t5000", ["batch", 4])])
    outcome = gnnpred("predict", save(model, tmp_path), "--batch-size", 4, "--json")
    assert outcome.code == 0, outcome.err
