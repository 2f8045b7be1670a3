"""Devices: the shipped tables, names, peaks, what a precision runs as, and a user's own file."""

import json
import re

import pytest

from gnnpred.errors import GnnpredError, UsageError
from gnnpred.graph import DType
from gnnpred.hardware import DEFAULT_DEVICE_NAME, find_device, list_devices, load_device_file
from gnnpred.job import JobSpec, Precision, resolve_precision

MY_GPU = """
name = "MyGPU-1"
fp32_tflops = 40.0
fp16_tensor_tflops = 160.0
memory_gb = 32
mem_bandwidth_gb_s = 1000.0
num_sms = 80
boost_clock_mhz = 1800
"""


def test_the_table_holds_at_least_84_devices_with_unique_names():
    names = [device.name for device in list_devices()]
    assert len(names) >= 84
    assert len(set(names)) == len(names)
    assert DEFAULT_DEVICE_NAME in names


def test_no_two_devices_share_a_full_spelling():
    owner = {}
    for device in list_devices():
        for spelling in (device.name, *device.aliases):
            key = re.sub("[^a-z0-9]", "", spelling.lower())
            assert owner.setdefault(key, device.name) == device.name, spelling


@pytest.mark.parametrize(
    ("asked", "found"),
    [
        ("A100-SXM4-80GB", "A100-SXM4-80GB"),
        ("nvidia a100 sxm4 80gb", "A100-SXM4-80GB"),
        ("NVIDIA GeForce RTX 3090", "RTX3090"),
        ("TITANRTX", "TitanRTX"),
        ("V100", "V100-SXM2-16GB"),
        ("GB200", "GB200-186GB"),
        ("MI250", "MI250"),
        ("AMD Instinct MI250", "MI250-1GCD"),
        ("AMD Radeon RX 7900 XTX", "RX7900XTX"),
        ("H20", "H20-SXM-96GB"),
    ],
)
def test_names_aliases_vendor_words_and_unique_short_names_are_found(asked, found):
    assert find_device(asked).name == found


def test_a_wrong_name_gets_the_nearest_three():
    with pytest.raises(UsageError) as caught:
        find_device("RTX3091")
    suggested = re.search(r"did you mean (.*?)\?", str(caught.value)).group(1).split(", ")
    assert len(suggested) == 3
    assert "RTX3090" in suggested


def test_a_name_that_fits_several_devices_names_them_all():
    with pytest.raises(UsageError, match=r"fits several: did you mean A100-PCIe-40GB, .*A100-SXM4-80GB"):
        find_device("A100")


# (device, dtype, TFLOP/s): datasheets; without a unit the fp32 rate
PEAKS = [
    ("A100-SXM4-80GB", DType.TF32, 156),
    ("A100-SXM4-80GB", DType.FP64, 19.5),  # DMMA
    ("A100-SXM4-80GB", DType.FP8, 312),
    ("V100-SXM2-16GB", DType.FP16, 125),
    ("V100-SXM2-16GB", DType.TF32, 15.7),
    ("V100-SXM2-16GB", DType.BF16, 15.7),
    ("GTX1080Ti", DType.FP16, 11.34),
    ("P100-SXM2-16GB", DType.FP16, 21.2),  # packed half
    ("MI100", DType.FP32, 46.1),  # matrix units
    ("H100-SXM5-80GB", DType.FP8, 1978.9),
    ("RTX3090", DType.INT8, 35.58),
]


@pytest.mark.parametrize(("name", "dtype", "tflops"), PEAKS)
def test_peak_is_the_rate_at_which_the_type_really_runs(name, dtype, tflops):
    assert find_device(name).peak_tflops(dtype) == tflops


def test_every_device_has_a_positive_peak_for_every_float_type():
    for device in list_devices():
        for dtype in DType:
            assert device.peak_tflops(dtype) > 0, (device.name, dtype)


def test_tf32_without_units_runs_as_fp32_and_says_so():
    precision, note = resolve_precision(Precision.TF32, find_device("V100"))
    assert precision is Precision.FP32
    assert "runs as fp32" in note


@pytest.mark.parametrize("precision", [Precision.BF16, Precision.MIXED_BF16])
@pytest.mark.parametrize("device", ["V100", "T4", "MI50"])
def test_bf16_without_units_is_refused_with_what_to_use(precision, device):
    with pytest.raises(UsageError, match=r"no bf16 units.*use --precision (fp16|mixed)"):
        resolve_precision(precision, find_device(device))


@pytest.mark.parametrize("device", ["A100-SXM4-40GB", "MI100", "RTX3090", "RX7900XTX"])
def test_bf16_with_units_is_kept(device):
    assert resolve_precision(Precision.MIXED_BF16, find_device(device)) == (Precision.MIXED_BF16, None)


@pytest.mark.parametrize(
    ("text", "precision"),
    [("AMP", "mixed"), ("amp_fp16", "mixed"), ("amp_bf16", "mixed-bf16"), ("FP16", "fp16"), ("bfloat16", "bf16")],
)
def test_precision_aliases(text, precision):
    assert Precision.parse(text) == precision


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"batch_size": 0}, "batch size"),
        ({"batch_size": -4}, "batch size"),
        ({"optimizer": "sdg"}, "unknown optimizer"),
        ({"memory_format": "nchwc"}, "unknown memory format"),
        ({"strategy": "magic"}, "unknown strategy"),
        ({"compiler": "gcc"}, "unknown compiler"),
        ({"gpus": 0}, "at least 1"),
        ({"gpus": 6, "nodes": 4}, "divisible"),
    ],
)
def test_a_job_that_cannot_be_is_refused(changes, message):
    with pytest.raises(UsageError, match=message):
        JobSpec(device=find_device("V100"), **changes)


def test_a_device_file_gives_a_device(tmp_path):
    toml, as_json = tmp_path / "my.toml", tmp_path / "my.json"
    toml.write_text(MY_GPU)
    device = load_device_file(toml)
    assert (device.name, device.num_sms, device.peak_tflops(DType.FP16)) == ("MyGPU-1", 80, 160.0)
    assert not device.supports("bf16")
    as_json.write_text(
        json.dumps(
            {
                "name": "MyGPU-1",
                "fp32_tflops": 40.0,
                "fp16_tensor_tflops": 160.0,
                "memory_gb": 32,
                "mem_bandwidth_gb_s": 1000.0,
                "num_sms": 80,
                "boost_clock_mhz": 1800,
            }
        )
    )
    assert load_device_file(as_json) == device


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("name = ", "not valid TOML"),
        ('name = "x"', "missing fp32_tflops, memory_gb"),
        (MY_GPU + "fp32_tflop = 3\n", "unknown field 'fp32_tflop'"),
        (MY_GPU.replace("32\n", '"much"\n'), "memory_gb must be a number"),
        (MY_GPU.replace("1000.0", "-1.0"), "mem_bandwidth_gb_s must be"),
        (MY_GPU.replace("1000.0", "nan"), "mem_bandwidth_gb_s must be"),
        (MY_GPU.replace("40.0", "0"), "fp32_tflops must be above 0"),
    ],
)
def test_a_wrong_device_file_says_what_is_wrong_in_one_line(tmp_path, text, message):
    path = tmp_path / "my.toml"
    path.write_text(text)
    with pytest.raises(GnnpredError, match=re.escape(message)) as caught:
        load_device_file(path)
    assert "\n" not in str(caught.value)


def test_a_device_file_that_is_not_there_is_one_line(tmp_path):
    with pytest.raises(GnnpredError, match=r"cannot read device file .*No such file"):
        load_device_file(tmp_path / "absent.toml")
