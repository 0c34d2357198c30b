"""Datasets by name, from the first source that has them, as arrays or as files that are decoded on access."""

from fdbd.data.datasets.archive import extract
from fdbd.data.datasets.download import DownloadError, fetch
from fdbd.data.datasets.formats import from_folder, from_list, from_npz
from fdbd.data.datasets.info import DatasetInfo, info, list_datasets
from fdbd.data.datasets.sources import DatasetUnavailable, load, status, verify
from fdbd.data.images import ImageFiles, Images
from fdbd.data.preprocessing import PRESETS, Preprocess
