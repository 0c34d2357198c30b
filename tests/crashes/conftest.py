"""The harness and its operations run in a process of their own, with a library preloaded."""

collect_ignore = ["harness.py", "operations.py"]
