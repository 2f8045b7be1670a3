"""Splits hold groups together, balance folds, and stay put when rows are added."""

import json

import pytest

from gnnpred.corpus.families import family_of
from gnnpred.corpus.splits import load_split, make_split, write_splits
from gnnpred.errors import GnnpredError
from gnnpred.job import Phase
from tests.helpers.corpus import make_row


def _rows(counts: dict[str, int]):
    return [
        make_row(
            row_id=f"{family}{i}", family=family, architecture=f"{family}-{i % 3}", device="RTX3090" if i % 2 else "T4"
        )
        for family, count in counts.items()
        for i in range(count)
    ]


COUNTS = {"resnet": 50, "vit": 20, "vgg": 18, "mobile": 17, "swin": 15, "dpn": 5, "nfnet": 4}


@pytest.mark.parametrize("name", ["family", "architecture"])
def test_no_group_straddles_folds_and_all_folds_are_used(name):
    rows = _rows(COUNTS)
    split = make_split(name, rows)
    folds_by_group = {}
    for row in rows:
        folds_by_group.setdefault(getattr(row, name), set()).add(split.fold_of(row))
    assert all(len(folds) == 1 for folds in folds_by_group.values())
    assert {fold for folds in folds_by_group.values() for fold in folds} == set(range(5))


def test_folds_are_balanced_by_training_rows():
    rows = _rows(dict.fromkeys("abcdefghij", 10))
    split = make_split("family", rows)
    sizes = [sum(split.fold_of(row) == fold for row in rows) for fold in range(5)]
    assert sizes == [20] * 5


def test_split_does_not_depend_on_row_order():
    rows = _rows(COUNTS)
    assert make_split("family", rows).fold_by_group == make_split("family", rows[::-1]).fold_by_group


def test_known_groups_stay_when_rows_are_added(tmp_path):
    before = write_splits(tmp_path, _rows(COUNTS))["family"].fold_by_group
    after = write_splits(tmp_path, _rows(COUNTS | {"new": 80, "vgg": 200}))["family"].fold_by_group
    assert {family: after[family] for family in before} == before
    assert "new" in after
    assert load_split(tmp_path / "family.json").fold_by_group == after


def test_only_devices_with_enough_rows_are_held_out():
    rows = [*_rows({"resnet": 130}), make_row(row_id="x", device="K80")]
    split = make_split("device", rows)
    assert set(split.fold_by_group) == {"RTX3090", "T4"}
    assert split.fold_of(rows[-1]) is None


def test_inference_rows_do_not_weigh_in_the_balance():
    rows = _rows({"a": 10, "b": 10})
    inference = [make_row(row_id=f"i{i}", family="c", phase=Phase.INFERENCE) for i in range(1000)]
    split = make_split("family", rows + inference)
    assert split.fold_by_group["a"] != split.fold_by_group["b"]


@pytest.mark.parametrize("content", ["{}", "[]", "not json", json.dumps({"split": "family", "folds": {"a": "x"}})])
def test_broken_split_files_are_refused(tmp_path, content):
    path = tmp_path / "family.json"
    path.write_text(content)
    with pytest.raises(GnnpredError, match="not a split file"):
        load_split(path)


@pytest.mark.parametrize(
    ("source", "family"),
    [
        ("timm:resnet50", "resnet"), ("timm:seresnext101_32x4d", "resnet"), ("torchvision:wide_resnet50_2", "resnet"),
        ("timm:resnetv2_50x1_bit", "resnet"), ("own:preact_resnet18", "resnet"), ("timm:resnest50d", "resnet"),
        ("timm:tf_efficientnet_b0", "mobile"), ("torchvision:mobilenet_v2", "mobile"), ("timm:mnasnet_100", "mobile"),
        ("timm:vit_base_patch16_224", "vit"), ("timm:deit3_small_patch16_224", "vit"),
        ("timm:beit_base_patch16_224", "vit"),
        ("timm:swin_tiny_patch4_window7_224", "swin"), ("timm:convnext_tiny", "convnext"),
        ("timm:regnety_032", "regnet"),
        ("timm:inception_resnet_v2", "inception"), ("timm:dm_nfnet_f0", "nfnet"), ("timm:nf_resnet50", "nfnet"),
        ("timm:repvgg_b0", "repvgg"), ("torchvision:vgg16_bn", "vgg"), ("timm:cspresnet50", "csp"),
        ("hf:BertForQuestionAnswering?hidden_size=768", "bert"), ("hf:GPT2LMHeadModel?n_layer=36", "gpt"),
        ("timm:mobilevit_s", "pyramid_vit"), ("timm:xcit_nano_12_p8_224", "cross_covariance"), ("timm:dpn68", "dpn"),
    ],
)  # fmt: skip
def test_families_are_strict(source, family):
    assert family_of(source) == family
