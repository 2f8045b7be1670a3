"""What a framework's version decides by default."""

import re

_PYTORCH_WITHOUT_TF32_MATMUL = (1, 12)  # release notes of 1.12
_TENSORFLOW_WITH_TF32 = (2, 4)
_NVIDIA_TENSORFLOW = (1, 15)  # NVIDIA's maintained build, which had TF32 as well


def version_numbers(version: str) -> tuple[int, ...]:
    """Leading numbers of a version: ``2.3.0a0+x`` -> (2, 3, 0)."""
    match = re.match(r"\d+(\.\d+)*", version)
    return tuple(int(number) for number in match.group().split(".")) if match else ()


def tf32_was_default(framework: str, version: str) -> bool:
    """TensorFlow turned TF32 on in 2.4; NVIDIA's maintained 1.15 had it too."""
    if framework != "tensorflow":
        return True
    numbers = version_numbers(version)
    return not numbers or numbers[:2] == _NVIDIA_TENSORFLOW or numbers >= _TENSORFLOW_WITH_TF32


def only_convolutions_use_tf32(framework: str, version: str, note: str) -> bool:
    """PyTorch 1.12 took TF32 away from matmul by default; NVIDIA's containers kept it. ``note`` is free text."""
    note = note.lower()
    if framework != "pytorch" or "ngc" in note or "matmul switched on" in note:
        return False
    if any(mark in version.lower() for mark in ("ngc", "nv", "a0+")):
        return False
    return version_numbers(version) >= _PYTORCH_WITHOUT_TF32_MATMUL


def framework_version_number(text: str) -> float:
    """``1.12.1a0+git`` -> 1.6: major + minor / 20, a number that grows with releases; 0 where unknown.

    Container names may stand around it (``ngc-20.03 (1.5)``): the first pair with a major below 10 counts. A
    container's date alone stands for the PyTorch of that month.
    """
    pairs = [(int(major), int(minor or 0)) for major, minor in re.findall(r"(\d+)(?:\.(\d+))?", text)]
    for major, minor in pairs:
        if major < 10:
            return major + min(minor, 19) / 20
    for year, month in pairs:
        if 17 <= year < 40:
            # PyTorch 1.0 came in 2018-12 and a minor release every 3.4 months up to 2.0 (2023-03)
            minor = max(0.0, ((year - 18) * 12 + month - 12) / 3.4)
            return 1 + minor / 20 if minor < 14 else 2 + (minor - 14) / 20
    return 0.0


def has_foreach_optimizer(framework: str, version: str, optimizer: str) -> bool:
    """Whether the update runs over lists of tensors instead of one kernel after the other for each.

    PyTorch's default on CUDA since 2.0; LAMB comes from Apex, which always had it. Unknown counts as new.
    """
    number = framework_version_number(version)
    return framework != "pytorch" or optimizer == "lamb" or number == 0 or number >= 2
