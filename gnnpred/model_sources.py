"""Models by name, without weights: ``timm:``, ``torchvision:``, ``hf:`` and a user's own ``module:function``.

Everything is built on the meta device, so a model of any size costs no memory, and nothing is
downloaded. Needs the ``models`` extra; only the export command and the corpus build import this.
"""

import difflib
import importlib
import importlib.util
import inspect
import json
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import parse_qsl

from gnnpred.errors import GnnpredError, UsageError

if TYPE_CHECKING:
    import torch

SOURCE_FORMS = (
    "timm:NAME, torchvision:NAME, hf:CONFIG.json, hf:CLASS?size=value&... or MODULE:FUNCTION "
    "(a function of your own that returns a module and its example inputs, and may take batch_size)"
)
_NEEDS_MODELS_EXTRA = "needs the models extra: pip install 'gnnpred[models]'"
DEFAULT_IMAGE_SIZE = 224
DEFAULT_SEQ_LEN = 512
_VIDEO_FRAMES = 16  # torchvision's video recipes train on clips of 16 frames
_AUDIO_SAMPLES = 16_000 * 5  # five seconds at 16 kHz


class BuiltModel(NamedTuple):
    """A module in train mode and the tensors it is called with, both on the meta device (or where asked)."""

    module: "torch.nn.Module"
    example_inputs: "tuple[torch.Tensor, ...]"


def build_model(
    source: str,
    *,
    batch_size: int = 2,
    image_size: int | tuple[int, int] | None = None,
    seq_len: int | None = None,
    num_classes: int | None = None,
    train: bool = True,
    device: str = "meta",
    for_export: bool = False,
    explicit_attention: bool = False,
    model_options: Mapping[str, Any] | None = None,
) -> BuiltModel:
    """The module that ``source`` names, with random or no weights, and example inputs at ``batch_size``.

    ``image_size`` (pixels) and ``seq_len`` (tokens) default to what the model was designed for.
    ``for_export`` swaps code that the ONNX exporters refuse for an equivalent; with ``explicit_attention``
    attention is two products and a softmax instead of one function. ``model_options`` go to the
    constructor. Raises UsageError for an unknown form, GnnpredError for an unknown model, a missing
    extra or a model that cannot be built.
    """
    if batch_size < 1:
        raise UsageError(f"batch size must be at least 1, got {batch_size}")
    prefix, separator, name = source.partition(":")
    if not separator or not name or not prefix:
        raise UsageError(f"cannot read the model source {source!r}: write it as {SOURCE_FORMS}")
    _require("torch")
    declare_torchvision_ops()  # a user's own function may import timm as well
    builders: dict[str, Callable[..., BuiltModel]] = {
        "timm": _build_timm,
        "torchvision": _build_torchvision,
        "hf": _build_transformers,
    }
    options = {
        "batch_size": batch_size,
        "image_size": (image_size, image_size) if isinstance(image_size, int) else image_size,
        "seq_len": seq_len,
        "num_classes": num_classes,
        "device": device,
        "for_export": for_export,
        "explicit_attention": explicit_attention,
        "model_options": dict(model_options or {}),
    }
    built = builders[prefix](name, **options) if prefix in builders else _build_users(prefix, name, **options)
    built.module.train(train)
    return built


def check_source(source: str) -> None:
    """Raise what :func:`build_model` would for a name that does not exist; nothing is built."""
    prefix, _separator, name = source.partition(":")
    if prefix == "timm":
        timm = _require("timm")
        if not timm.is_model(name):
            raise _unknown_name("timm", name, timm.list_models())
    elif prefix == "torchvision":
        _check_torchvision_name(_require("torchvision.models"), name)
    elif prefix == "hf":
        name, _separator, query = name.partition("?")
        options = {key: _parsed_value(value) for key, value in parse_qsl(query, keep_blank_values=True)}
        options.pop("attn_implementation", None)
        _transformers_config(_require("transformers"), name, options)
    else:
        _users_function(prefix, name)


# ---------------------------------------------------------------------------------------- packages


def declare_torchvision_ops() -> None:
    """Make torchvision importable beside a torch build that cannot load its compiled extension.

    torchvision registers fake kernels for ops of its extension (nms ...) at import and fails where
    the extension does not load. Their schemas are declared here; architectures never call them.
    """
    spec = importlib.util.find_spec("torchvision")
    if spec is None or spec.origin is None or "torchvision" in sys.modules:
        return
    import torch

    package = Path(spec.origin).parent
    for extension in package.glob("_C*.so"):
        try:
            torch.ops.load_library(str(extension))
            return
        except OSError:
            continue
    registrations = package / "_meta_registrations.py"
    if not registrations.is_file():
        return
    for op_name in re.findall(r'register_fake\("torchvision::(\w+)"\)', registrations.read_text()):
        if not hasattr(torch.ops.torchvision, op_name):
            library = torch.library.Library("torchvision", "FRAGMENT")
            library.define(f"{op_name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
            _DECLARED_LIBRARIES.append(library)


_DECLARED_LIBRARIES: list[Any] = []  # a Library undoes its definitions when collected


def _require(package: str) -> Any:
    if package != "torch":
        declare_torchvision_ops()
    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise GnnpredError(f"{package} cannot be imported ({error}): building models {_NEEDS_MODELS_EXTRA}") from error


def _unknown_name(library: str, name: str, known: list[str]) -> GnnpredError:
    nearest = difflib.get_close_matches(name, known, n=3, cutoff=0.0)
    return GnnpredError(f"{library} has no model {name!r}; nearest names: {', '.join(nearest)}")


def _construct(make: Callable[[], "torch.nn.Module"], what: str, device: str) -> "torch.nn.Module":
    """``make()`` on ``device``; constructors that read values while building are built on the CPU, then moved."""
    import torch

    try:
        with torch.device(device):
            return make()
    except (RuntimeError, NotImplementedError) as meta_error:
        if device != "meta":
            raise GnnpredError(f"{what} cannot be built: {_first_line(meta_error)}") from meta_error
    try:
        return make().to("meta")
    except Exception as error:
        raise GnnpredError(f"{what} cannot be built: {_first_line(error)}") from error


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


# ---------------------------------------------------------------------------------------- timm


def _build_timm(
    name: str, *, batch_size: int, image_size: tuple[int, int] | None, num_classes: int | None, device: str,
    explicit_attention: bool, model_options: dict[str, Any], **_: Any,
) -> BuiltModel:  # fmt: skip
    timm = _require("timm")
    import torch

    if not timm.is_model(name):
        raise _unknown_name("timm", name, timm.list_models())
    options = dict(model_options)
    if num_classes is not None:
        options["num_classes"] = num_classes

    def make(**extra: Any) -> torch.nn.Module:
        return timm.create_model(name, pretrained=False, **options, **extra)

    what = f"timm:{name}"
    with _explicit_timm_attention(explicit_attention):
        if image_size is None:
            module = _construct(make, what, device)
            channels, *image_size = module.pretrained_cfg.get("input_size", (3, DEFAULT_IMAGE_SIZE, DEFAULT_IMAGE_SIZE))
        else:
            channels = options.get("in_chans", 3)
            try:
                module = _construct(lambda: make(img_size=image_size), what, device)
            except TypeError:  # convolutional models take any size and no img_size
                module = _construct(make, what, device)
    return BuiltModel(module, (torch.empty(batch_size, channels, *image_size, device=device),))


@contextmanager
def _explicit_timm_attention(active: bool) -> Iterator[None]:
    if not active:
        yield
        return
    from timm.layers import set_fused_attn, use_fused_attn

    was_fused = bool(use_fused_attn())
    set_fused_attn(False)
    try:
        yield
    finally:
        set_fused_attn(was_fused)


# ---------------------------------------------------------------------------------------- torchvision


def _build_torchvision(
    name: str, *, batch_size: int, image_size: tuple[int, int] | None, num_classes: int | None, device: str,
    model_options: dict[str, Any], **_: Any,
) -> BuiltModel:  # fmt: skip
    models = _require("torchvision.models")
    import torch

    _check_torchvision_name(models, name)
    options: dict[str, Any] = {"weights": None, **model_options}
    if num_classes is not None:
        options["num_classes"] = num_classes
    if name in ("googlenet", "inception_v3"):
        options.setdefault("init_weights", False)  # minutes of scipy sampling for weights that nobody reads
    family = models.get_model_builder(name).__module__.split(".")[2]
    if family == "segmentation":
        options.setdefault("weights_backbone", None)
    size = image_size or _torchvision_image_size(models, name)
    if name.startswith("vit_"):
        options["image_size"] = size[0]
    module = _construct(lambda: models.get_model(name, **options), f"torchvision:{name}", device)
    frames = (_VIDEO_FRAMES,) if family == "video" else ()
    return BuiltModel(module, (torch.empty(batch_size, 3, *frames, *size, device=device),))


def _check_torchvision_name(models: Any, name: str) -> None:
    supported = [
        known
        for known in models.list_models()
        if not known.startswith(("quantized_", "raft_"))
        and models.get_model_builder(known).__module__.split(".")[2:3] != ["detection"]
    ]
    if name not in supported:
        if name in models.list_models():
            raise GnnpredError(
                f"torchvision:{name} cannot be exported: detection, optical-flow and quantized models "
                "run data-dependent code; export the backbone instead"
            )
        raise _unknown_name("torchvision", name, supported)


def _torchvision_image_size(models: Any, name: str) -> tuple[int, int]:
    """Pixels that the model's first published weights were made for."""
    weights = list(models.get_model_weights(name))
    transform = weights[0].transforms() if weights else None
    size = getattr(transform, "crop_size", None) or getattr(transform, "resize_size", None) or [DEFAULT_IMAGE_SIZE]
    return (size[0], size[-1])


# ---------------------------------------------------------------------------------------- transformers


def _build_transformers(
    name: str, *, batch_size: int, image_size: tuple[int, int] | None, seq_len: int | None, num_classes: int | None,
    device: str, for_export: bool, explicit_attention: bool, model_options: dict[str, Any], **_: Any,
) -> BuiltModel:  # fmt: skip
    transformers = _require("transformers")
    name, _separator, query = name.partition("?")
    options = {key: _parsed_value(value) for key, value in parse_qsl(query, keep_blank_values=True)} | model_options
    if num_classes is not None:
        options["num_labels"] = num_classes
    attention = options.pop("attn_implementation", "eager" if explicit_attention else None)
    config, model_class = _transformers_config(transformers, name, options)
    if image_size is not None and hasattr(config, "image_size"):
        config.image_size = image_size[0]
    if for_export and _is_mixture_of_experts(config):
        # the default sorts tokens with an integer histogram, which no exporter translates
        config._experts_implementation = "batched_mm"
    if hasattr(config, "apply_spec_augment"):
        config.apply_spec_augment = False  # time masking draws random spans on the host
    for layer_drop in ("layerdrop", "encoder_layerdrop", "decoder_layerdrop"):
        if getattr(config, layer_drop, None):
            setattr(config, layer_drop, 0.0)  # skips whole layers by a host-side random number
    extra = {"attn_implementation": attention} if attention else {}

    def make() -> Any:
        if hasattr(model_class, "from_config"):
            return model_class.from_config(config, **extra)
        if attention:
            config._attn_implementation = attention
        return model_class(config)

    model = _construct(make, f"hf:{name}", device)
    inputs = _transformers_inputs(model, config, batch_size=batch_size, image_size=image_size, seq_len=seq_len,
                                  device=device)  # fmt: skip
    return BuiltModel(_positional_module(model, tuple(inputs)), tuple(inputs.values()))


def _parsed_value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return {"True": True, "False": False, "None": None}.get(text, text)


def _transformers_config(transformers: Any, name: str, options: dict[str, Any]) -> tuple[Any, Any]:
    """The configuration object and the model class of a config file, a class name or a model type."""
    if name.endswith(".json"):
        path = Path(name)
        try:
            fields = json.loads(path.read_text())
        except OSError as error:
            raise GnnpredError(f"cannot read the model configuration {name}: {error.strerror}") from error
        except ValueError as error:
            raise GnnpredError(f"{name} is not a JSON model configuration: {error}") from error
        if not isinstance(fields, dict) or "model_type" not in fields:
            raise GnnpredError(f"{name} names no model_type: it must be the config.json of a transformers model")
        fields |= options
        model_type = fields.pop("model_type")
        config = _config_of_type(transformers, model_type, fields)
        architectures = fields.get("architectures") or []
        if architectures:
            return config, _transformers_class(transformers, architectures[0])
        return config, _default_class(transformers, config)
    if name in transformers.CONFIG_MAPPING:
        config = _config_of_type(transformers, name, options)
        return config, _default_class(transformers, config)
    model_class = _transformers_class(transformers, name)
    return _checked_config(model_class.config_class, options, name), model_class


def _config_of_type(transformers: Any, model_type: str, fields: dict[str, Any]) -> Any:
    if model_type not in transformers.CONFIG_MAPPING:
        raise _unknown_name("transformers", model_type, list(transformers.CONFIG_MAPPING))
    return _checked_config(transformers.CONFIG_MAPPING[model_type], fields, model_type)


def _checked_config(config_class: Any, fields: dict[str, Any], name: str) -> Any:
    try:
        return config_class(**fields)
    except Exception as error:  # configurations validate themselves with every kind of exception
        raise GnnpredError(f"hf:{name}: the sizes do not make a configuration: {_first_line(error)}") from error


def _transformers_class(transformers: Any, name: str) -> Any:
    model_class = getattr(transformers, name, None)
    if model_class is None or getattr(model_class, "config_class", None) is None:
        known = [other for other in dir(transformers) if re.search(r"(Model|For\w+)$", other)]
        raise _unknown_name("transformers", name, known + list(transformers.CONFIG_MAPPING))
    return model_class


def _default_class(transformers: Any, config: Any) -> Any:
    """The auto class of the task that models of this type are trained on."""
    for auto_name in ("AutoModelForCausalLM", "AutoModelForMaskedLM", "AutoModelForSeq2SeqLM",
                      "AutoModelForSpeechSeq2Seq", "AutoModelForCTC", "AutoModelForImageClassification"):  # fmt: skip
        auto = getattr(transformers, auto_name)
        if type(config) in auto._model_mapping:
            encoder_like = auto_name == "AutoModelForCausalLM" and type(config) in (
                transformers.AutoModelForMaskedLM._model_mapping
            )
            if not encoder_like:  # bert also has a decoder form that nobody trains
                return auto
    return transformers.AutoModel


def _is_mixture_of_experts(config: Any) -> bool:
    names = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
    return any(getattr(config, name, None) for name in names)


def _transformers_inputs(
    model: Any, config: Any, *, batch_size: int, image_size: tuple[int, int] | None, seq_len: int | None, device: str
) -> "dict[str, torch.Tensor]":
    import torch

    text_config = config.get_text_config() if hasattr(config, "get_text_config") else config
    longest = getattr(text_config, "max_position_embeddings", None) or getattr(text_config, "n_positions", None)
    tokens = seq_len or min(DEFAULT_SEQ_LEN, longest or DEFAULT_SEQ_LEN)

    def ids(length: int) -> torch.Tensor:
        return torch.zeros(batch_size, length, dtype=torch.long, device=device)

    main = model.main_input_name
    inputs: dict[str, torch.Tensor] = {}
    if main == "input_ids":
        inputs["input_ids"] = ids(tokens)
    elif main == "pixel_values":
        vision = getattr(config, "vision_config", None) or config
        size = image_size or getattr(vision, "image_size", None) or DEFAULT_IMAGE_SIZE
        height, width = (size, size) if isinstance(size, int) else size
        channels = getattr(vision, "num_channels", 3)
        inputs[main] = torch.empty(batch_size, channels, height, width, device=device)
        if hasattr(config, "vision_config") and hasattr(config, "text_config"):
            inputs["input_ids"] = ids(tokens)
    elif main == "input_values":
        inputs[main] = torch.empty(batch_size, seq_len or _AUDIO_SAMPLES, device=device)
    elif main == "input_features":
        frames = 2 * getattr(config, "max_source_positions", 1500)  # whisper's convolution halves the frames
        inputs[main] = torch.empty(batch_size, getattr(config, "num_mel_bins", 80), seq_len or frames, device=device)
    else:
        raise GnnpredError(f"{type(model).__name__} takes {main!r}, for which no example input is known; "
                           "write a MODULE:FUNCTION that returns the module and its inputs")  # fmt: skip
    if getattr(config, "is_encoder_decoder", False):
        decoder_longest = getattr(config, "max_target_positions", None) or tokens
        inputs["decoder_input_ids"] = ids(min(tokens, decoder_longest))
    return inputs


def _positional_module(model: Any, input_names: tuple[str, ...]) -> "torch.nn.Module":
    """``model`` as a module of positional tensors that returns its main output alone."""
    import torch

    class PositionalModel(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model
            self.input_names = input_names

        def forward(self, *args: torch.Tensor) -> torch.Tensor:
            options = {} if getattr(self.model.config, "use_cache", None) is None else {"use_cache": False}
            with _unpacked_sequences():
                outputs = self.model(**dict(zip(self.input_names, args, strict=True)), return_dict=True, **options)
            for field in ("logits", "prediction_logits", "last_hidden_state"):
                if outputs.get(field) is not None:
                    return outputs[field]
            return outputs[0]

    return PositionalModel()


@contextmanager
def _unpacked_sequences() -> Iterator[None]:
    """Let transformers know, without reading values, that each row is one unpadded sequence.

    At run time it looks at the position ids, finds a single sequence and calls attention with
    ``is_causal`` instead of a mask. Meta tensors have no values to look at, and under export it
    assumes the general case and materialises a mask that a training step never makes.
    """
    from transformers import masking_utils

    replacements: dict[str, Callable[..., Any]] = {
        "find_packed_sequence_indices": lambda *_args, **_kwargs: None,
        "is_torchdynamo_exporting": lambda: False,
    }
    originals = {name: getattr(masking_utils, name) for name in replacements if hasattr(masking_utils, name)}
    for name in originals:
        setattr(masking_utils, name, replacements[name])
    try:
        yield
    finally:
        for name, original in originals.items():
            setattr(masking_utils, name, original)


# ---------------------------------------------------------------------------------------- a user's own


def _build_users(
    module_name: str, function_name: str, *, batch_size: int, device: str, model_options: dict[str, Any], **_: Any
) -> BuiltModel:
    import torch

    function = _users_function(module_name, function_name)
    what = f"{module_name}:{function_name}"
    options = dict(model_options)
    if "batch_size" in inspect.signature(function).parameters:
        options["batch_size"] = batch_size

    def call() -> Any:
        return function(**options)

    try:
        with torch.device(device):
            returned = call()
    except Exception:
        try:
            returned = call()
        except Exception as error:
            raise GnnpredError(f"{what} raised {_first_line(error)}") from error
    if not isinstance(returned, tuple) or len(returned) != 2 or not isinstance(returned[0], torch.nn.Module):
        raise GnnpredError(f"{what} must return (module, example_inputs), got {type(returned).__name__}")
    module, inputs = returned
    inputs = (inputs,) if isinstance(inputs, torch.Tensor) else tuple(inputs)
    if not inputs or not all(isinstance(example, torch.Tensor) for example in inputs):
        raise GnnpredError(f"{what}: example_inputs must be tensors, in the order of the module's arguments")
    return BuiltModel(module.to(device), tuple(example.to(device) for example in inputs))


def _users_function(module_name: str, function_name: str) -> Callable[[], Any]:
    try:
        if module_name.endswith(".py"):
            path = Path(module_name)
            if not path.is_file():
                raise GnnpredError(f"{module_name} does not exist; a model source is one of {SOURCE_FORMS}")
            spec = importlib.util.spec_from_file_location(path.stem, path)
            assert spec is not None
            assert spec.loader is not None
            module = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
        else:
            with _working_folder_importable():
                module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is not None and module_name.split(".")[0] == error.name.split(".")[0]:
            raise UsageError(
                f"unknown model source {module_name + ':' + function_name!r}: {module_name!r} is neither a known "
                f"prefix nor a Python module here; write {SOURCE_FORMS}"
            ) from error
        raise GnnpredError(f"importing {module_name} failed: {_first_line(error)}") from error
    except GnnpredError:
        raise
    except Exception as error:
        raise GnnpredError(f"importing {module_name} failed: {_first_line(error)}") from error
    function = getattr(module, function_name, None)
    if not callable(function):
        names = [name for name, value in vars(module).items() if callable(value) and not name.startswith("_")]
        nearest = difflib.get_close_matches(function_name, names, n=3, cutoff=0.0)
        raise GnnpredError(f"{module_name} has no function {function_name!r}; nearest: {', '.join(nearest) or 'none'}")
    return function


@contextmanager
def _working_folder_importable() -> Iterator[None]:
    folder = str(Path.cwd())
    sys.path.insert(0, folder)
    try:
        yield
    finally:
        sys.path.remove(folder)
