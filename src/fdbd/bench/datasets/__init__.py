"""Datasets by name, from the first source that has them, as arrays or as files that are decoded when asked for."""

from fdbd.preprocess import PRESETS, Preprocess

from .archive import ArchiveError, extract
from .collection import ImageFiles, Images
from .download import DownloadError, fetch
from .formats import FormatError, from_folder, from_list, from_npz
from .info import DatasetInfo, info, list_datasets
from .sources import DatasetUnavailable, load, status, verify
from .store import cache_root, data_roots

__all__ = [
    "PRESETS",
    "ArchiveError",
    "DatasetInfo",
    "DatasetUnavailable",
    "DownloadError",
    "FormatError",
    "ImageFiles",
    "Images",
    "Preprocess",
    "cache_root",
    "data_roots",
    "extract",
    "fetch",
    "from_folder",
    "from_list",
    "from_npz",
    "info",
    "list_datasets",
    "load",
    "status",
    "verify",
]
