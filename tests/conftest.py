"""Property tests draw the same examples in every run, so that a run's result says something of the code alone.

`pytest --hypothesis-profile=default` draws new ones.
"""

from hypothesis import settings

settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.load_profile("repeatable")
