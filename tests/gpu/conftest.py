"""The GPU tests take their ranks from the same pool as those of gloo on CPU."""

from tests.distributed.conftest import all_ranks, ranks, rest

__all__ = ["all_ranks", "ranks", "rest"]
