from .datasets import (
    DatasetInfo,
    DatasetUnavailable,
    list_datasets,
    load,
    register_dataset,
)
from .images import ImageFiles, Images

__all__ = [
    "DatasetInfo",
    "DatasetUnavailable",
    "ImageFiles",
    "Images",
    "list_datasets",
    "load",
    "register_dataset",
]
