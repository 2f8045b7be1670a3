"""Imports point one way, and predicting stays light."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "gnnpred"

# From the bottom up; a module may import its own row and the rows above it in this list.
LAYERS = (
    ("errors", "units", "files", "software"),
    ("op_kinds", "graph"),
    ("hardware",),
    ("job",),
    ("onnx_io", "passes", "costs", "memory", "metrics"),
    ("features", "graph_summary", "communication", "calibration", "known_devices", "intervals"),
    ("checkpoint",),
    ("prediction", "inference_correction", "predictor", "runs"),
    ("score", "calibration_runs", "model_sources", "export", "corpus"),
    ("communication_fit",),
    ("training", "collect"),
    ("additions",),
    ("cli",),
)
LAYER_OF = {name: level for level, names in enumerate(LAYERS) for name in names}
# The package's front door and its runner hand everything on.
DOORS = {"__init__", "__main__"}

# Third-party package -> the only parts that may import it.
SOLE_IMPORTERS = {
    "torch_geometric": {"training"},
    "optuna": {"training"},
    "ray": {"collect", "training", "cli"},
    "sklearn": {"training"},
    "matplotlib": {"training"},
    "torch": {"training", "corpus", "export", "model_sources", "collect"},
    "timm": {"corpus", "export", "model_sources"},
    "torchvision": {"corpus", "export", "model_sources"},
    "transformers": {"corpus", "export", "model_sources"},
    "onnx": {"onnx_io", "export", "training"},
    "onnxruntime": {"checkpoint", "training"},
    "typer": {"cli"},
    "rich": {"cli", "corpus"},  # the corpus build shows its progress
}


def part_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imports_of(path: Path) -> Iterator[tuple[int, str]]:
    """(line, dotted module) of every import that runs; those for type checkers alone are left out."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            for child in ast.walk(node):
                child.skipped = True
    for node in ast.walk(tree):
        if getattr(node, "skipped", False):
            continue
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import"
            if node.module == "gnnpred":
                yield from ((node.lineno, f"gnnpred.{alias.name}") for alias in node.names)
            else:
                yield node.lineno, node.module or ""


def modules() -> list[Path]:
    return sorted(path for path in PACKAGE.rglob("*.py") if part_of(path) not in DOORS)


def test_every_module_has_its_layer():
    assert {part_of(path) for path in modules()} <= set(LAYER_OF)


def test_imports_point_one_way():
    wrong = [
        f"{path.relative_to(ROOT)}:{line} imports {name}"
        for path in modules()
        for line, name in imports_of(path)
        if name.startswith("gnnpred.") and LAYER_OF.get(name.split(".")[1], 0) > LAYER_OF[part_of(path)]
    ]
    assert not wrong, "\n".join(wrong)


def test_each_heavy_package_has_its_sole_importers():
    wrong = [
        f"{path.relative_to(ROOT)}:{line} imports {name}"
        for path in modules()
        for line, name in imports_of(path)
        if part_of(path) not in SOLE_IMPORTERS.get(name.split(".")[0], {part_of(path)})
    ]
    assert not wrong, "\n".join(wrong)


def loaded_modules(code: str) -> set[str]:
    """Modules that a fresh interpreter holds after running ``code``."""
    done = subprocess.run(
        [sys.executable, "-c", f"{code}\nimport sys\nprint('\\n'.join(sys.modules))"],
        cwd=ROOT, capture_output=True, text=True, check=True, timeout=120,
    )  # fmt: skip
    return set(done.stdout.splitlines())


def test_importing_the_package_loads_neither_numpy_nor_onnx():
    assert not {"numpy", "onnx", "onnxruntime", "typer", "rich"} & loaded_modules("import gnnpred")


@pytest.mark.parametrize(
    "module", ["predictor", "checkpoint", "features", "onnx_io", "communication", "score", "cli.app"]
)
def test_nothing_on_the_way_to_a_prediction_imports_the_training_stack(module):
    heavy = {
        "torch",
        "torch_geometric",
        "pandas",
        "pyarrow",
        "sklearn",
        "scipy",
        "timm",
        "transformers",
        "optuna",
        "ray",
    }
    assert not heavy & loaded_modules(f"import gnnpred.{module}")


def test_predicting_imports_neither_torch_nor_pandas():
    code = (
        "import io, contextlib\n"
        "from gnnpred.cli import run\n"
        "with contextlib.redirect_stdout(io.StringIO()):\n"
        "    code = run(['predict', 'examples/resnet50.onnx', '--batch-size', '8', '--gpus', '8'])\n"
        "assert code == 0, code\n"
    )
    loaded = loaded_modules(code)
    assert "onnxruntime" in loaded
    heavy = {"torch", "torch_geometric", "pandas", "pyarrow", "sklearn", "scipy", "onnxscript", "ray", "optuna"}
    assert not heavy & loaded
