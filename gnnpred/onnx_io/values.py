"""A tensor while its graph is being read: shape, dtype, role and, for small constants, content."""

from __future__ import annotations

from math import prod

import numpy as np
import onnx
from onnx import numpy_helper

from gnnpred.errors import GnnpredError
from gnnpred.graph import DType, Role

MAX_FOLDED_ELEMENTS = 16_384  # largest constant that is evaluated; shapes and indices are far smaller
MAX_FLOAT_ELEMENTS = 64  # floats above this are weights: never copied out of the file

MAX_MASK_ELEMENTS = 1_000_000  # largest float constant whose content is looked at

_MASK_NUMPY_BY_DTYPE = {DType.FP32: np.float32, DType.FP16: np.float16, DType.FP64: np.float64}
_T = onnx.TensorProto
DTYPE_BY_ELEMENT_TYPE: dict[int, DType] = {
    _T.FLOAT: DType.FP32, _T.DOUBLE: DType.FP64, _T.FLOAT16: DType.FP16, _T.BFLOAT16: DType.BF16,
    _T.INT64: DType.INT64, _T.INT32: DType.INT32, _T.INT16: DType.INT16, _T.INT8: DType.INT8,
    _T.UINT8: DType.UINT8, _T.UINT16: DType.INT16, _T.UINT32: DType.INT32, _T.UINT64: DType.INT64,
    _T.BOOL: DType.BOOL, _T.STRING: DType.STRING, _T.COMPLEX64: DType.COMPLEX64, _T.COMPLEX128: DType.COMPLEX64,
    _T.FLOAT8E4M3FN: DType.FP8, _T.FLOAT8E4M3FNUZ: DType.FP8, _T.FLOAT8E5M2: DType.FP8, _T.FLOAT8E5M2FNUZ: DType.FP8,
    _T.UINT4: DType.INT4, _T.INT4: DType.INT4,
}  # fmt: skip
for _name, _dtype in (
    ("FLOAT4E2M1", DType.INT4),
    ("FLOAT8E8M0", DType.FP8),
    ("UINT2", DType.INT4),
    ("INT2", DType.INT4),
):
    if hasattr(_T, _name):  # newer than the oldest onnx we accept
        DTYPE_BY_ELEMENT_TYPE[getattr(_T, _name)] = _dtype

ELEMENT_TYPE_BY_DTYPE: dict[DType, int] = {
    DType.FP32: _T.FLOAT, DType.FP64: _T.DOUBLE, DType.FP16: _T.FLOAT16, DType.BF16: _T.BFLOAT16,
    DType.INT64: _T.INT64, DType.INT32: _T.INT32, DType.INT16: _T.INT16, DType.INT8: _T.INT8,
    DType.UINT8: _T.UINT8, DType.BOOL: _T.BOOL, DType.STRING: _T.STRING, DType.COMPLEX64: _T.COMPLEX64,
    DType.FP8: _T.FLOAT8E4M3FN, DType.INT4: _T.INT4,
}  # fmt: skip

_DTYPE_BY_NUMPY = {
    "float64": DType.FP64, "float32": DType.FP32, "float16": DType.FP16, "int64": DType.INT64, "int32": DType.INT32,
    "int16": DType.INT16, "int8": DType.INT8, "uint8": DType.UINT8, "uint16": DType.INT16, "uint32": DType.INT32,
    "uint64": DType.INT64, "bool": DType.BOOL,
}  # fmt: skip


def dtype_of(element_type: int, where: str) -> DType:
    """Our dtype for an ONNX element type; an unknown number is an error that says where it stands."""
    dtype = DTYPE_BY_ELEMENT_TYPE.get(element_type)
    if dtype is None:
        raise GnnpredError(f"{where} has the unknown element type {element_type}; is the file damaged or too new?")
    return dtype


class Value:
    """One tensor of the graph being read.

    ``shape`` is always a tuple of integers (the batch bound to a prime while reading); ``exact`` is
    False when it rests on a guess. ``batch_inner`` says how many elements lie inside the batch factor
    of a merged axis (None: the batch is the axis' outermost factor). ``elements`` makes it a sequence.
    """

    __slots__ = ("_array", "_proto", "batch_inner", "dtype", "elements", "exact", "name", "role", "shape")

    def __init__(
        self,
        shape: tuple[int, ...],
        dtype: DType,
        role: Role,
        *,
        name: str = "",
        array: np.ndarray | None = None,
        proto: onnx.TensorProto | None = None,
        exact: bool = True,
    ) -> None:
        self.shape = shape
        self.dtype = dtype
        self.role = role
        self.name = name
        self.exact = exact
        self.batch_inner: int | None = None
        self.elements: list[Value] | None = None
        self._array = array
        self._proto = proto

    @property
    def rank(self) -> int:
        return len(self.shape)

    @property
    def num_elements(self) -> int:
        return prod(self.shape)

    @property
    def is_constant(self) -> bool:
        return self.role is Role.CONSTANT

    @property
    def depends_on_data(self) -> bool:
        return self.role is Role.ACTIVATION or self.role is Role.INPUT

    @property
    def has_content(self) -> bool:
        """Whether the file itself holds the data (it may be too big to evaluate)."""
        return self._array is not None or self._proto is not None

    @property
    def array(self) -> np.ndarray | None:
        """The content of a small constant, read from the file when first asked for; else None."""
        if self._array is None and self._proto is not None:
            limit = MAX_FLOAT_ELEMENTS if self.dtype.is_float else MAX_FOLDED_ELEMENTS
            proto, self._proto = self._proto, None
            if self.dtype is not DType.STRING and self.num_elements <= limit:
                self._array = _array_of(proto)
        return self._array

    def looks_like_mask(self) -> bool:
        """Whether a stored float tensor holds nothing but zeros and very negative numbers (attention masks)."""
        proto = self._proto
        numpy_dtype = _MASK_NUMPY_BY_DTYPE.get(self.dtype)
        if proto is None or self.num_elements > MAX_MASK_ELEMENTS or numpy_dtype is None:
            return False
        if len(proto.raw_data) % np.dtype(numpy_dtype).itemsize:
            return False  # damaged
        numbers = np.frombuffer(proto.raw_data[: self.num_elements * int(self.dtype.bytes_per_element)], numpy_dtype)
        if numbers.size == 0 and self.dtype is DType.FP32:
            numbers = np.array(proto.float_data, np.float32)
        return numbers.size > 1 and bool(numbers.min() <= -100 and np.all((numbers == 0) | (numbers <= -100)))


def _array_of(proto: onnx.TensorProto) -> np.ndarray | None:
    try:
        array = numpy_helper.to_array(proto)
    except (ValueError, TypeError, KeyError, OverflowError):  # data and dims of a damaged file disagree: shape stands
        return None
    return array.astype(np.float32) if array.dtype.kind == "V" else array  # bf16, fp8, int4 come as ml_dtypes


def value_of_array(array: np.ndarray, *, dtype: DType | None = None, name: str = "", exact: bool = True) -> Value:
    """A constant with known content."""
    dtype = dtype or _DTYPE_BY_NUMPY.get(array.dtype.name, DType.FP32)
    return Value(tuple(array.shape), dtype, Role.CONSTANT, name=name, array=array, exact=exact)
