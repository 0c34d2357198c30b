"""`fuzz.py` runs in a process of its own, under a limit of memory."""

collect_ignore = ["fuzz.py", "targets.py"]
