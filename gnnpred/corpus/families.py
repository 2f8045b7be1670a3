"""Model families for honest splits: networks of one family share their building block.

The grouping is strict. Everything built from residual bottleneck or basic blocks is ``resnet``
(wide, grouped, squeeze-excited, split-attention, pre-activation, partly attention-based), everything
built from inverted residuals is ``mobile``, plain vision transformers with all their training
recipes are ``vit``.
"""

import re

# (family, pattern on the name without its library), first match wins
_PATTERNS: tuple[tuple[str, str], ...] = (
    ("inception", r"inception(?!_next)|googlenet"),
    ("nfnet", r"nf_|dm_nf|nfnet|eca_nfnet"),
    ("regnet", r"regnet"),
    ("repvgg", r"repvgg|mobileone|repghost|fastvit|mobileclip|repvit"),
    ("convnext", r"convnext|convformer|caformer|poolformer|metaformer|inception_next|convmixer|mambaout"),
    ("swin", r"swin|maxvit|maxxvit|coatnet|coatnext|rmlp|maxxvitv2|coat_net|volo|davit|gcvit|hiera|mvit"),
    ("cross_covariance", r"xcit"),
    ("pyramid_vit", r"pvt|twins|nest|jx_nest|pit_|convit|tnt|visformer|coat_|crossvit|focalnet|nextvit|edgenext|"
     r"efficientformer|levit|mobilevit|tiny_vit|efficientvit|ghostvit|starnet|fasternet|shvit|swiftformer|vitamin|cait"),
    ("vit", r"vit|deit|beit|eva|flexivit|aimv2|samvit|naflexvit|naflex|dinov|siglip|clip"),
    ("mixer", r"mixer|resmlp|gmlp|gmixer|sequencer"),
    ("mobile", r"efficientnet|mobilenet|mnas|semnas|fbnet|spnasnet|mixnet|tinynet|lcnet|hardcorenas|rexnet|ghostnet|"
     r"tf_mixnet|mobiledet|atomnas"),
    ("resnet", r"resnet|resnext|senet|seresne|sknet|skres|resnest|res2net|res2next|botnet|halonet|lambda_res|eca_|"
     r"ecares|gernet|bat_res|sebotnet|halo2botnet|sehalonet|lamhalobotnet|haloregnetz|gcres|eca_botnext|ssd300|bit_|legacy_se|"
     r"wide_res|preact_res|tresnet"),
    ("csp", r"cspres|sedarknet|cspdark|darknet|yolo|cs3|dla|selecsls"),
    ("vgg", r"vgg"),
    ("alexnet", r"alexnet|overfeat"),
    ("densenet", r"densenet"),
    ("squeezenet", r"squeezenet"),
    ("shufflenet", r"shufflenet"),
    ("small_cnn", r"lenet|mnist|cifar10_cnn"),
    ("dpn", r"dpn"),
    ("hrnet", r"hrnet"),
    ("vovnet", r"vovnet|hardnet|pelee"),
    ("xception", r"xception"),
    ("nasnet", r"nasnet|pnasnet"),
    ("hgnet", r"hgnet"),
    ("unet", r"unet|nnunet|vnet|deeplab|fcn"),
    ("bert", r"bert|distilbert|electra"),
    ("gpt", r"gpt|opt|mpt|llama|bloom"),
    ("transformer_xl", r"transformer_xl"),
    ("translation_transformer", r"transformer_big|encoder_language_model"),
    ("lstm", r"lstm|gnmt"),
    ("rcnn", r"mask_rcnn"),
    ("tacotron", r"tacotron"),
    ("waveglow", r"waveglow"),
)  # fmt: skip
# a pattern starts a word: "nest" is in "jx_nest", not in "resnest"
_COMPILED = tuple((family, re.compile(rf"(?:^|_)(?:{pattern})")) for family, pattern in _PATTERNS)
# names whose block is not what the pattern order would say
_EXCEPTIONS = {
    "cspresnet": "csp",
    "cspresnext": "csp",
    "tresnet": "resnet",
    "resnet": "resnet",
    "nest": "pyramid_vit",
}


def family_of(source: str) -> str:
    """Family of a model source such as ``timm:resnet50`` or ``hf:BertForQuestionAnswering?...``."""
    name = source.partition(":")[2]
    name = name.split("?")[0].split(".")[0].lower()
    for prefix, family in _EXCEPTIONS.items():
        if name.startswith(prefix):
            return family
    for family, pattern in _COMPILED:
        if pattern.search(name):
            return family
    return re.split(r"[_\d]", name)[0] or name
