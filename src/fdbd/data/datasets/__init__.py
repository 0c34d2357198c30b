"""Datasets by name, from the first source that has them, as arrays or as files that are decoded on
access."""

from fdbd.core.preprocessing import PRESETS, Preprocess
from fdbd.data.datasets.formats import from_folder, from_list, from_npz
from fdbd.data.datasets.info import DatasetInfo, info, list_datasets, register_dataset
from fdbd.data.datasets.sources import DatasetUnavailable, load, status, verify
from fdbd.data.images import ImageFiles, Images
from fdbd.util.archive import extract
from fdbd.util.download import DownloadError, fetch
