"""LSUN as it is unpacked: a database (LMDB) of encoded pictures for each class and part, or a folder of pictures for each class."""

from __future__ import annotations

import io
import re
from itertools import islice
from pathlib import Path

import torch
from torch import Tensor

from ..errors import BadData
from .files import decode_picture
from .images import LSUN, Examples

_DATABASE = re.compile(r"(.+)_(train|val)_lmdb")
_PICTURES = {".png", ".jpg", ".jpeg", ".webp", ".bmp"}


def read_lsun(folder: Path, *, size: int, limit: int | None = None) -> tuple[Examples, Examples, int]:
    """Training examples, held-out examples and the number of classes. Pictures are scaled to size × size, at most `limit` are read.

    CLASS_val_lmdb is held out where it is there, otherwise every fifth picture. Of the limit a fifth is held out as well.
    """
    databases = [found for path in (folder.iterdir() if folder.is_dir() else ()) if (found := _DATABASE.fullmatch(path.name))]
    if not databases:
        examples = _read_folders(folder, size, limit)
        return *_every_fifth_held_out(examples), int(examples.labels.max()) + 1
    classes = sorted({found[1] for found in databases})
    parts = sorted({found[2] for found in databases})
    names = {part: [f"{name}_{part}_lmdb" for name in classes] for part in parts}
    if missing := [name for part in parts for name in names[part] if not (folder / name).is_dir()]:
        raise BadData(f"{' and '.join(missing)} are not in {folder}, and others are.", "Each class needs the parts that another class has.")
    if len(parts) == 1:
        return *_every_fifth_held_out(_read_databases(folder, names[parts[0]], size, limit)), len(classes)
    held_out = None if limit is None else max(1, limit // 5)
    others = None if limit is None else limit - max(1, limit // 5)
    return _read_databases(folder, names["train"], size, others), _read_databases(folder, names["val"], size, held_out), len(classes)


def _every_fifth_held_out(examples: Examples) -> tuple[Examples, Examples]:
    held_out = torch.arange(len(examples.labels)) % 5 == 0
    return Examples(examples.inputs[~held_out], examples.labels[~held_out]), Examples(examples.inputs[held_out], examples.labels[held_out])


def _read_folders(folder: Path, size: int, limit: int | None) -> Examples:
    """bedroom/0001.jpg …; a limit takes them at equal distances."""
    classes = sorted(path for path in folder.iterdir() if path.is_dir()) if folder.is_dir() else []
    paths = [(path, number) for number, one in enumerate(classes) for path in sorted(one.iterdir()) if path.suffix.lower() in _PICTURES]
    if not paths:
        raise BadData(
            f"{folder} holds no pictures: expected a folder or a database for each class of LSUN.",
            "For example bedroom/0001.jpg, or bedroom_train_lmdb/data.mdb.",
        )
    if limit is not None:
        paths = paths[:: max(1, len(paths) // limit)][:limit]
    pixels = torch.stack([decode_picture(path, str(path), size) for path, _ in paths])
    return LSUN.normalised(pixels, torch.tensor([number for _, number in paths]))


def _read_databases(folder: Path, names: list[str], size: int, limit: int | None) -> Examples:
    """One database a class, in the order of the classes. A limit is shared out evenly; what one class has too little of, later ones get."""
    pictures: list[Tensor] = []
    labels: list[int] = []
    for number, name in enumerate(names):
        share = (limit - len(pictures)) // (len(names) - number) if limit is not None else None
        pictures += _pictures(folder / name, size, share)
        labels += [number] * (len(pictures) - len(labels))
    if not pictures:
        raise BadData(f"{' and '.join(names)} in {folder} hold no pictures.", "Unpack LSUN's archives again.")
    return LSUN.normalised(torch.stack(pictures), torch.tensor(labels))


def _pictures(database: Path, size: int, most: int | None) -> list[Tensor]:
    """The first pictures in the order of their keys, no others are read. LSUN's keys are hashes, so the first are as good a choice as any."""
    try:
        import lmdb
    except ImportError as error:
        raise ImportError('LSUN as LMDB needs the package lmdb: pip install "clipwise[data]"') from error
    file = database / "data.mdb"
    repair = "Unpack LSUN's archive again."
    try:
        with lmdb.open(str(database), readonly=True, lock=False, readahead=False) as opened:
            announced = (opened.info()["last_pgno"] + 1) * opened.stat()["psize"]
            if file.stat().st_size < announced:  # reading on would end the process
                raise BadData(f"{file} is cut off: {file.stat().st_size} of {announced} bytes are there.", repair)
            with opened.begin() as transaction:
                rows = islice(transaction.cursor(), most)
                return [decode_picture(io.BytesIO(value), f"{key.decode(errors='replace')} in {file}", size) for key, value in rows]
    except lmdb.Error as error:
        raise BadData(f"{file} is not an LMDB that can be read ({error}).", repair) from None
