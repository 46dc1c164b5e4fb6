from dataclasses import replace

from launcher.report.profile_table import profile_table
from tests.strategies.costs.test_profile import PROFILE


def test_a_profile_is_a_block_per_microbatch_size_with_its_error():
    (small, first), large = PROFILE.sizes
    text = profile_table(replace(PROFILE, sizes=((small, replace(first, error=0.025)), large)))
    assert "microbatches of 1: ms per unit, to 2.5 %, MiB per microbatch" in text
    assert "microbatches of 4: ms per unit, MiB per microbatch" in text
    assert sum(line.strip().startswith("any stage") for line in text.splitlines()) == 2
