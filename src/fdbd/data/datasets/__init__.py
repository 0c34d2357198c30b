"""Datasets by name, from the first source that has them, as arrays or as files that are decoded when asked for."""

from fdbd.data.datasets.archive import ArchiveError as ArchiveError
from fdbd.data.datasets.archive import extract as extract
from fdbd.data.datasets.download import DownloadError as DownloadError
from fdbd.data.datasets.download import fetch as fetch
from fdbd.data.datasets.formats import FormatError as FormatError
from fdbd.data.datasets.formats import from_folder as from_folder
from fdbd.data.datasets.formats import from_list as from_list
from fdbd.data.datasets.formats import from_npz as from_npz
from fdbd.data.datasets.info import DatasetInfo as DatasetInfo
from fdbd.data.datasets.info import info as info
from fdbd.data.datasets.info import list_datasets as list_datasets
from fdbd.data.datasets.sources import DatasetUnavailable as DatasetUnavailable
from fdbd.data.datasets.sources import load as load
from fdbd.data.datasets.sources import status as status
from fdbd.data.datasets.sources import verify as verify
from fdbd.data.images import ImageFiles as ImageFiles
from fdbd.data.images import Images as Images
from fdbd.data.preprocessing import PRESETS as PRESETS
from fdbd.data.preprocessing import Preprocess as Preprocess
