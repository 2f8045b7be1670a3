"""Compare both front ends on many models: python benchmarks/parity_sweep.py [SOURCE ...] [--cache FOLDER].

Exports take about ten seconds a model; with --cache they are made once. Prints one line per model with the
relative differences of flops, bytes and kernel launches, of the forward pass and of a training step, and the ops
that differ with --verbose.
"""

import argparse
import hashlib
import tempfile
from collections import Counter
from pathlib import Path

from gnnpred.corpus.parity import ParityReport, compare_front_ends
from gnnpred.corpus.trace import TRACE_BATCH_SIZE, trace_module
from gnnpred.errors import GnnpredError
from gnnpred.export import export_model
from gnnpred.model_sources import build_model
from gnnpred.onnx_io import read_graph

SMALL_LLAMA = "hidden_size=512&num_hidden_layers=4&intermediate_size=1376&num_attention_heads=8&num_key_value_heads=4"
SOURCES = (
    "timm:resnet50", "timm:resnext50_32x4d", "timm:seresnet50", "timm:ecaresnet50t", "timm:regnety_032",
    "timm:densenet121", "timm:efficientnet_b0", "timm:tf_efficientnetv2_s", "timm:mobilenetv3_large_100",
    "timm:mobilenetv2_100", "timm:ghostnet_100", "timm:mnasnet_100", "timm:rexnet_100", "timm:nfnet_l0",
    "timm:resnetv2_50x1_bit", "timm:dm_nfnet_f0", "timm:convnext_tiny", "timm:convnextv2_nano", "timm:vgg16_bn",
    "timm:inception_v3", "timm:xception41", "timm:dla34", "timm:hrnet_w18_small", "timm:cspdarknet53",
    "timm:vit_small_patch16_224", "timm:deit_tiny_distilled_patch16_224", "timm:swin_tiny_patch4_window7_224",
    "timm:swinv2_tiny_window8_256", "timm:beit_base_patch16_224", "timm:mixer_b16_224", "timm:gmlp_s16_224",
    "timm:coat_tiny", "timm:coatnet_0_rw_224", "timm:maxvit_tiny_tf_224", "timm:pit_s_224", "timm:twins_svt_small",
    "timm:poolformer_s12", "timm:volo_d1_224", "timm:xcit_nano_12_p16_224", "timm:crossvit_9_240",
    "timm:levit_128", "timm:mobilevit_s", "timm:edgenext_small", "timm:eva02_tiny_patch14_224", "timm:hiera_tiny_224",
    "torchvision:resnet18", "torchvision:alexnet", "torchvision:googlenet", "torchvision:shufflenet_v2_x1_0",
    "torchvision:squeezenet1_1", "torchvision:vit_b_16", "torchvision:swin_v2_t", "torchvision:fcn_resnet50",
    "torchvision:r3d_18", "hf:bert?num_hidden_layers=3", "hf:gpt2?n_layer=3", "hf:t5?num_layers=2",
    f"hf:llama?{SMALL_LLAMA}", "hf:distilbert?n_layers=2", "hf:deberta-v2?num_hidden_layers=2&hidden_size=256"
    "&num_attention_heads=4&intermediate_size=512", "hf:albert?num_hidden_layers=2", "hf:vit?num_hidden_layers=3",
    "hf:opt?num_hidden_layers=2", "hf:gpt_neox?num_hidden_layers=2&hidden_size=512&num_attention_heads=8"
    "&intermediate_size=2048", "hf:mixtral?num_hidden_layers=1&hidden_size=512&intermediate_size=1024"
    "&num_local_experts=4", "hf:wav2vec2?num_hidden_layers=2", "hf:segformer", "hf:whisper?encoder_layers=2"
    "&decoder_layers=2",
)  # fmt: skip


def compare_source(source: str, folder: Path, *, opset: int, exporter: str) -> ParityReport:
    """Export (or take from ``folder``), trace, compare."""
    digest = hashlib.sha256(f"{source} {opset} {exporter}".encode()).hexdigest()[:16]
    path = folder / f"{digest}.onnx"
    if not path.exists():
        export_model(source, path, opset=opset, exporter=exporter)
    module, inputs = build_model(source, batch_size=TRACE_BATCH_SIZE, for_export=source.startswith("hf:mixtral"))
    return compare_front_ends(read_graph(path, batch_size=1), trace_module(module, inputs))


def _summary(differing: Counter) -> str:
    return ", ".join(f"{count}x {kind}{list(shapes)}" for (kind, shapes), count in sorted(differing.items()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sources", nargs="*", default=SOURCES)
    parser.add_argument("--cache", type=Path)
    parser.add_argument("--opset", type=int, default=20)
    parser.add_argument("--exporter", default="dynamo")
    parser.add_argument("--verbose", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.cache or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        within = total = 0
        for source in options.sources:
            try:
                report = compare_source(source, folder, opset=options.opset, exporter=options.exporter)
            except GnnpredError as error:
                print(f"{source}: {error}", flush=True)
                continue
            total += 1
            forward, step = report.forward_error, report.step_error
            within += abs(step.flops) <= 1e-3 and abs(step.bytes_moved) <= 0.02
            print(
                f"{source[:50]:50} forward flops {forward.flops:+.3%} bytes {forward.bytes_moved:+.2%} "
                f"launches {forward.launches:+.1%}; step {step.flops:+.3%} {step.bytes_moved:+.2%} "
                f"{step.launches:+.1%}; ops {report.missing.total()}/{report.surplus.total()}",
                flush=True,
            )
            if options.verbose:
                print("   only traced:", _summary(report.missing)[:3000])
                print("   only in ONNX:", _summary(report.surplus)[:3000])
        print(f"{within} of {total} models within 0.1 % flops and 2 % bytes of a training step")


if __name__ == "__main__":
    main()
