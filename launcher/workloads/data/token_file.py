"""A file of token ids, mapped into memory. Free of torch."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from launcher.workloads.data.source import TextSource, check_file

Tokens = npt.NDArray[np.unsignedinteger]


def memory_map(source: TextSource) -> Tokens:
    """The ids of a ``tokens`` source, read from the disk only where they are used.

    Raises:
        DataError: The file is missing or cannot be read.
    """
    assert source.path is not None
    path = check_file("data.path", source.path)
    dtype = np.dtype(source.dtype).newbyteorder("<")
    size = path.stat().st_size
    count = min(size, source.max_bytes or size) // dtype.itemsize
    if not count:  # an empty file cannot be mapped
        return np.empty(0, dtype)
    return np.memmap(path, dtype=dtype, mode="r", shape=(count,))
