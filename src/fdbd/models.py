"""`fdbd.models`: networks by name, under their documented name (the code is `fdbd.networks`)."""

from fdbd.networks import *  # noqa: F403
