"""OpenOOD's protocols (Zhang et al., 2023, version 1.5) as configs in the package.

The data lie as OpenOOD's own download script leaves them, below a folder that FDBD_DATA names:
image lists in ``benchmark_imglist/``, images in ``images_classic/`` and ``images_largescale/``,
checkpoints in ``results/``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from fdbd.bench.config import PROTOCOLS, Config
from fdbd.util.files import data_roots

PREFIX = "openood:"
LISTS = "benchmark_imglist"
IMAGE_FOLDERS = ("images_classic", "images_largescale")
DEFAULT_NETWORK = "resnet50"
"""The network of the protocol that has several."""


class Missing(NamedTuple):
    """A file that a protocol needs and that is not there."""

    file: str
    """The file's name in OpenOOD."""
    folder: str
    """Where it belongs, below a folder that FDBD_DATA names."""
    source: str
    """Where to get it."""

    def __str__(self) -> str:
        return f"{self.file} in {self.folder} below FDBD_DATA; from {self.source}"


def list_protocols() -> list[str]:
    """Names of the protocols, as `fdbd bench` takes them.

    >>> list_protocols()
    ['openood:cifar10', 'openood:cifar100', 'openood:imagenet', 'openood:imagenet200']
    """
    found = set()
    for path in PROTOCOLS.glob("*.toml"):
        found.add(PREFIX + path.stem.partition("-")[0])
    return sorted(found)


def protocol(name: str, network: str | None = None) -> Config:
    """The config of a protocol; `network` chooses among those of ``openood:imagenet``.

    >>> protocol("openood:imagenet", "vit_b_16").model
    'torchvision:vit_b_16'
    """
    if name not in list_protocols():
        raise ValueError(f"no protocol is called {name!r}: there are {', '.join(list_protocols())}")
    data = name.removeprefix(PREFIX)
    networks = sorted(path.stem.partition("-")[2] for path in PROTOCOLS.glob(f"{data}-*.toml"))
    if not networks:
        if network is not None:
            raise ValueError(f"{name} has one network, that of OpenOOD: leave --model out")
        return Config.from_file(PROTOCOLS / f"{data}.toml")
    chosen = DEFAULT_NETWORK if network is None else network
    if chosen not in networks:
        raise ValueError(f"{name} has no network {chosen!r}: there are {', '.join(networks)}")
    return Config.from_file(PROTOCOLS / f"{data}-{chosen}.toml")


def missing_files(configs: Sequence[Config]) -> list[Missing]:
    """What these configs, one per seed, need and do not find: checkpoints, image lists, and the
    folders of the images that the lists name. Nothing is decoded."""
    found: dict[str, Missing] = {}
    for config in configs:
        if config.checkpoint is not None:
            _look_for(config.checkpoint, config.sources, found)
        for data in _datasets(config):
            _look_for_list(data, config.sources, found)
    return list(found.values())


def _datasets(config: Config) -> Iterator[str]:
    """Every dataset of a config that is one of OpenOOD's lists."""
    named = [config.train, config.id, *config.ood.values(), *config.shifted.values()]
    for extra in (config.validation, config.ood_validation):
        if isinstance(extra, str):
            named.append(extra)
    for data in named:
        if data.startswith(PREFIX):
            yield data.removeprefix(PREFIX)


def _look_for(path: str, sources: Mapping[str, str], found: dict[str, Missing]) -> None:
    if Path(path).is_file() or any((root / path).is_file() for root in data_roots()):
        return
    place = Path(path)
    found[path] = Missing(place.name, f"{place.parent}/", _source_of(path, sources))


def _look_for_list(data: str, sources: Mapping[str, str], found: dict[str, Missing]) -> None:
    """The list, and the first image of each folder that it names."""
    list_path = f"{LISTS}/{data}.txt"
    for root in data_roots():
        if (root / list_path).is_file():
            _look_for_images(root / list_path, sources, found)
            return
    found[list_path] = Missing(
        Path(list_path).name, f"{Path(list_path).parent}/", _source_of(LISTS, sources)
    )


def _look_for_images(
    list_file: Path, sources: Mapping[str, str], found: dict[str, Missing]
) -> None:
    seen: set[str] = set()
    with open(list_file, encoding="utf-8") as lines:
        for line in lines:
            path = line.strip().rpartition(" ")[0]
            folder = path.partition("/")[0]
            # One image of each folder at the top: a set of 50,000 files is not looked up one by
            # one.
            if not path or folder in seen:
                continue
            seen.add(folder)
            if not _is_image_there(path):
                places = " or ".join(f"{each}/{folder}/" for each in IMAGE_FOLDERS)
                found[folder] = Missing(path, places, _source_of(folder, sources))


def _is_image_there(path: str) -> bool:
    for root in data_roots():
        for folder in (*IMAGE_FOLDERS, "."):
            if (root / folder / path).is_file():
                return True
    return False


def _source_of(name: str, sources: Mapping[str, str]) -> str:
    """Where to get a file: what stands under the longest beginning of its path, else the answer for
    everything, under "*"."""
    best = "*"
    for start in sources:
        if name.startswith(start) and (best == "*" or len(start) > len(best)):
            best = start
    return sources.get(best, "OpenOOD's download script")
