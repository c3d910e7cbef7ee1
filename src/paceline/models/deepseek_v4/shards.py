"""Safetensors files: headers, the shard index, and memory-mapped tensors.

Written here rather than taken from the safetensors library so that a truncated, overlong or
inconsistent file is refused by name before any data is touched, and so that describing a checkpoint
needs no data at all. Source: the safetensors format description.
"""

from __future__ import annotations

import json
import math
import mmap
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from paceline.config import read_json_object
from paceline.types import CheckpointError

__all__ = [
    "DTYPE_BITS",
    "INDEX_NAME",
    "SINGLE_NAME",
    "TORCH_DTYPES",
    "MappedFiles",
    "StoredTensor",
    "index_problems",
    "listed",
    "read_header",
    "read_index",
]

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"

DTYPE_BITS = {
    "BOOL": 8,
    "U8": 8,
    "I8": 8,
    "F8_E4M3": 8,
    "F8_E5M2": 8,
    "F8_E8M0": 8,
    "I16": 16,
    "U16": 16,
    "F16": 16,
    "BF16": 16,
    "I32": 32,
    "U32": 32,
    "F32": 32,
    "I64": 64,
    "U64": 64,
    "F64": 64,
}
TORCH_DTYPES = {
    "U8": torch.uint8,
    "I8": torch.int8,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E8M0": torch.float8_e8m0fnu,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "I64": torch.int64,
}

_HEADER_LIMIT = 100_000_000
_LISTED_NAMES = 20


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Where one tensor lies.

    Attributes:
        name: as the file spells it.
        file: the safetensors file.
        dtype: safetensors' name of the stored type, for example ``"BF16"``.
        shape: stored shape (fp4 weights are packed two inputs a byte).
        start, end: byte range within the file.
    """

    name: str
    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int

    @property
    def num_bytes(self) -> int:
        """Bytes of data."""
        return self.end - self.start


class MappedFiles:
    """A memory map of the file in use; it lives as long as a view of it."""

    def __init__(self) -> None:
        self._maps: dict[Path, mmap.mmap] = {}

    def view(self, entry: StoredTensor) -> Tensor:
        """Return the stored tensor as a view of the file; private, so writes never reach it."""
        if entry.num_bytes == 0:
            return torch.empty(entry.shape, dtype=TORCH_DTYPES[entry.dtype])
        if entry.file not in self._maps:
            try:
                with entry.file.open("rb") as handle:
                    mapped = mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_COPY)
            except OSError as error:
                reason = error.strerror or error
                raise CheckpointError(f"{entry.file} cannot be mapped: {reason}") from None
            self._maps = {entry.file: mapped}
        dtype = TORCH_DTYPES[entry.dtype]
        raw = torch.frombuffer(
            self._maps[entry.file], dtype=torch.uint8, count=entry.num_bytes, offset=entry.start
        )
        if entry.start % dtype.itemsize:
            raw = raw.clone()
        return raw.view(dtype).view(entry.shape)


def read_index(path: Path) -> dict[str, str]:
    """Return the index's tensor name -> file name table.

    Raises:
        CheckpointError: the table is malformed or points outside the folder.
    """
    table = read_json_object(path).get("weight_map")
    if not isinstance(table, dict) or not all(isinstance(file, str) for file in table.values()):
        raise CheckpointError(f"{path} has no weight_map of tensor names to file names")
    for file in table.values():
        if Path(file).name != file or not file.endswith(".safetensors"):
            raise CheckpointError(
                f"{path} names the file {file!r}; a safetensors file of the same folder is needed"
            )
    return table


def index_problems(
    index: Mapping[str, str], stored: Mapping[str, StoredTensor], unreadable: set[str]
) -> list[str]:
    """Return how an index and the tensors found in its files disagree, as sentences.

    Args:
        index: tensor name -> file name.
        stored: what the readable files hold, by name in the file.
        unreadable: names of files whose content is unknown, left out of the comparison.
    """
    problems = []
    absent = [
        f"{name} (in {file})"
        for name, file in index.items()
        if file not in unreadable and (name not in stored or stored[name].file.name != file)
    ]
    if absent:
        problems.append(
            f"{INDEX_NAME} places {len(absent)} tensors in files that lack them: {listed(absent)}"
        )
    extra = [name for name in stored if name not in index]
    if extra:
        problems.append(
            f"{len(extra)} tensors are in the files but not in {INDEX_NAME}: {listed(extra)}"
        )
    return problems


def read_header(path: Path) -> list[StoredTensor]:
    """Read and check the header of one safetensors file.

    Raises:
        CheckpointError: the file is truncated or malformed; the message names it.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as handle:
            prefix = handle.read(8)
            length = int.from_bytes(prefix, "little")
            if prefix.startswith(b"version "):
                raise CheckpointError(f"{path} is a Git LFS pointer, not the file itself")
            if len(prefix) < 8 or (length <= _HEADER_LIMIT and 8 + length > size):
                raise CheckpointError(f"{path} is truncated: {size} bytes do not hold its header")
            if length > _HEADER_LIMIT:
                raise CheckpointError(f"{path} is not a safetensors file")
            text = handle.read(length)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from None
    try:
        header = json.loads(text)
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError):
        raise CheckpointError(f"{path} is not a safetensors file: its header is no JSON") from None
    if not isinstance(header, dict):
        raise CheckpointError(f"{path} is not a safetensors file: its header is no JSON object")

    base = 8 + length
    entries = [
        _parse_entry(path, name, value, base)
        for name, value in header.items()
        if name != "__metadata__"
    ]
    position = base
    for entry in sorted(entries, key=lambda each: (each.start, each.end)):
        if entry.start != position:
            raise CheckpointError(f"{path} is malformed: {entry.name} does not follow on the last")
        position = entry.end
    if position > size:
        raise CheckpointError(
            f"{path} is truncated: its header describes {position} bytes, the file has {size}"
        )
    if position < size:
        raise CheckpointError(
            f"{path} is malformed: its header describes {position} bytes, the file has {size}"
        )
    return entries


def _parse_entry(path: Path, name: str, value: object, base: int) -> StoredTensor:
    try:
        fields: Any = value
        dtype, shape, (start, end) = fields["dtype"], tuple(fields["shape"]), fields["data_offsets"]
        valid = isinstance(dtype, str) and all(
            isinstance(number, int) and number >= 0 for number in (*shape, start, end)
        )
    except (KeyError, TypeError, ValueError):
        valid = False
    if not valid:
        raise CheckpointError(f"{path} is malformed: bad header entry for {name}")
    if dtype not in DTYPE_BITS:
        raise CheckpointError(f"{path} stores {name} as {dtype}, which is not understood")
    if (end - start) * 8 != math.prod(shape) * DTYPE_BITS[dtype]:
        raise CheckpointError(
            f"{path} is malformed: {name} is {dtype} {list(shape)} but has {end - start} bytes"
        )
    return StoredTensor(name, path, dtype, shape, base + start, base + end)


def listed(names: Iterable[str]) -> str:
    """Return the first 20 names, comma-separated, and how many more there are."""
    every = list(names)
    shown = ", ".join(every[:_LISTED_NAMES])
    rest = len(every) - _LISTED_NAMES
    return f"{shown} and {rest} more" if rest > 0 else shown
