"""What a framework's version decides by default about TF32."""

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
