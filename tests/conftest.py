"""Settings for all tests. As it lies here, tests can import `fakes`."""

from hypothesis import settings

settings.register_profile("default", deadline=None, derandomize=True)
settings.register_profile("explore", deadline=None, max_examples=5000)
settings.load_profile("default")
