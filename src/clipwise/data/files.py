"""Files as people have them on disk: idx, CIFAR's Python batches, sheets of images; each checked before it is believed."""

from __future__ import annotations

import gzip
import io
import lzma
import pickle
import struct
from pathlib import Path
from typing import Any, BinaryIO, ClassVar

import torch
from torch import Tensor

from ..errors import BadData

_TYPES = {8: torch.uint8}
_OPENERS: dict[str, Any] = {".gz": gzip.decompress, ".xz": lzma.decompress}


def find(folder: Path, names: list[str], what: str, how: str) -> Path:
    """The first of these names that is there."""
    for name in names:
        if (folder / name).exists():
            return folder / name
    raise BadData(f"{what} is not in {folder}: expected {' or '.join(names)}.", how)


def decompressed(path: Path, packing: str | None = None) -> bytes:
    """What the file holds. packing: ".gz", ".xz" or "" for none, where the name does not say."""
    raw = path.read_bytes()
    opener = _OPENERS.get(path.suffix if packing is None else packing)
    try:
        return opener(raw) if opener else raw
    except (OSError, EOFError, lzma.LZMAError) as error:
        raise BadData(f"{path} is damaged or cut off ({error}).", "Remove it and fetch it again.") from None


def read_idx(path: Path) -> Tensor:
    """An idx file: two zero bytes, a type, the number of axes, one big-endian length an axis, the numbers. May be packed (.gz, .xz)."""
    return parse_idx(decompressed(path), str(path))


def parse_idx(raw: bytes, name: str) -> Tensor:
    repair = "Remove it and fetch it again; an idx file of unsigned bytes was expected."
    if len(raw) < 4 or raw[:2] != b"\0\0" or raw[2] not in _TYPES:
        raise BadData(f"{name} is not an idx file.", repair)
    axes = raw[3]
    shape = struct.unpack(f">{axes}I", raw[4 : 4 + 4 * axes]) if len(raw) >= 4 + 4 * axes else ()
    body = raw[4 + 4 * axes :]
    count = 1
    for length in shape:
        count *= length
    if not shape or len(body) != count:
        raise BadData(f"{name} announces {' × '.join(map(str, shape)) or 'nothing'} numbers and holds {len(body)} bytes.", repair)
    return torch.frombuffer(bytearray(body), dtype=_TYPES[raw[2]]).view(shape)


class _OnlyArrays(pickle.Unpickler):
    """Pickles can run anything; CIFAR's hold numpy arrays, lists and strings, and nothing else is let in."""

    _ALLOWED: ClassVar = {
        ("numpy.core.multiarray", "_reconstruct"), ("numpy._core.multiarray", "_reconstruct"), ("numpy", "ndarray"), ("numpy", "dtype"),
        ("_codecs", "encode"),
    }  # fmt: skip

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in self._ALLOWED:
            raise pickle.UnpicklingError(f"{module}.{name} does not belong into a data file")
        return super().find_class(module, name)


def read_cifar_batch(raw: bytes, name: str) -> tuple[Tensor, Tensor]:
    """One of CIFAR's Python batches: (10000, 3, 32, 32) bytes, and labels."""
    try:
        values = _OnlyArrays(io.BytesIO(raw), encoding="bytes").load()
        pixels = torch.from_numpy(values[b"data"].copy())
        labels = torch.tensor(values[b"labels"])
    except Exception as error:
        raise BadData(f"{name} is not a batch of CIFAR-10 ({error}).", "Unpack cifar-10-python.tar.gz again.") from None
    if pixels.dtype != torch.uint8 or pixels.shape != (len(labels), 3072):
        raise BadData(f"{name} holds {tuple(pixels.shape)} numbers for {len(labels)} labels.", "Unpack cifar-10-python.tar.gz again.")
    return pixels.view(-1, 3, 32, 32), labels


def decode_picture(file: Path | BinaryIO, name: str, size: int | None = None) -> Tensor:
    """(3, H, W) bytes; with `size` the middle square, scaled to size × size. name: what a refusal calls it."""
    try:
        from PIL import Image
    except ImportError as error:
        raise ImportError('pictures need the package Pillow: pip install "clipwise[data]"') from error
    try:
        with Image.open(file) as opened:
            picture = opened.convert("RGB")
    except OSError as error:
        raise BadData(f"{name} is not a picture that can be read ({error}).", "Remove it or replace it.") from None
    if size is not None:
        side = min(picture.size)
        left, top = (picture.width - side) // 2, (picture.height - side) // 2
        picture = picture.crop((left, top, left + side, top + side)).resize((size, size), Image.Resampling.BILINEAR)
    flat = torch.frombuffer(bytearray(picture.tobytes()), dtype=torch.uint8)
    return flat.view(picture.height, picture.width, 3).permute(2, 0, 1).contiguous()
