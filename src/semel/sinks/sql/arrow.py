"""What every database asks of Arrow: the kind of a type, and an array's values as numpy has them."""

from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc


def is_text(arrow_type: pa.DataType) -> bool:
    return bool(
        pa.types.is_string(arrow_type)
        or pa.types.is_large_string(arrow_type)
        or pa.types.is_string_view(arrow_type)
    )


def is_binary(arrow_type: pa.DataType) -> bool:
    return bool(
        pa.types.is_binary(arrow_type)
        or pa.types.is_large_binary(arrow_type)
        or pa.types.is_fixed_size_binary(arrow_type)
        or pa.types.is_binary_view(arrow_type)
    )


def has_zone(arrow_type: pa.DataType) -> bool:
    return bool(pa.types.is_timestamp(arrow_type) and arrow_type.tz is not None)


def filled(values: pa.Array) -> npt.NDArray[Any]:
    """As numpy, with zero where it is null; the field of a null is never read."""
    if values.null_count:
        values = values.fill_null(0)
    return np.asarray(values.to_numpy(zero_copy_only=False))


def singles(values: pa.Array, type_name: str) -> pa.Array:
    """As floats of 32 bits, rounded. Refuses what would be infinite or zero: Arrow's cast lets it pass."""
    rounded = values.cast(pa.float32())
    if pa.types.is_float64(values.type):
        overflows = pc.and_(pc.is_finite(values), pc.invert(pc.is_finite(rounded)))
        vanishes = pc.and_(pc.equal(rounded, 0), pc.not_equal(values, 0))
        if (row := pc.index(pc.or_(overflows, vanishes), True).as_py()) >= 0:
            lost, left = values[row].as_py(), rounded[row].as_py()
            raise ValueError(f"{lost} does not fit {type_name}, where it would be {left}")
    return rounded
