"""Settings of the whole suite: derandomised examples, and no engine tests where torch is not installed."""

from importlib.util import find_spec

from hypothesis import settings

settings.register_profile("checks", derandomize=True, deadline=None)
settings.register_profile("random", deadline=None)  # pytest --hypothesis-profile=random
settings.load_profile("checks")

collect_ignore = [] if find_spec("torch") else ["engine"]
