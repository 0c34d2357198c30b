from .datasets import (
    DatasetInfo,
    DatasetUnavailable,
    list_datasets,
    load,
    register_dataset,
)
from .images import ImageFiles, Images
from .pseudo_audio import audio_kinds
from .pseudo_text import text_kinds, token_kinds

__all__ = [
    "DatasetInfo",
    "DatasetUnavailable",
    "ImageFiles",
    "Images",
    "audio_kinds",
    "list_datasets",
    "load",
    "register_dataset",
    "text_kinds",
    "token_kinds",
]
