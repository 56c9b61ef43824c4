"""Settings for all tests. As it lies here, tests can import what lies beside it, such as `fakes`."""

from hypothesis import settings

settings.register_profile("default", max_examples=300, deadline=None, derandomize=True)
settings.register_profile("explore", max_examples=10_000, deadline=None)
settings.load_profile("default")
