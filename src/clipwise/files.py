"""Files that are either whole or not there."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path


def write_whole(path: str | Path, content: str | bytes) -> None:
    """Write beside the target, flush to the disk, then rename: a crash or a full disk leaves the old file as it was."""
    path = Path(path)
    data = content.encode("utf-8") if isinstance(content, str) else content
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(name, 0o666 & ~_umask())
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
