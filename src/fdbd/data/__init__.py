"""Images and features: reading, decoding, preparing; and datasets by name, to which
`register_dataset` adds your own.

Names are imported at the first use: processes that decode images import a part of this package
alone."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
