"""Experts spread over ranks: who holds which, and how tokens get to them and back."""

from strategies.models.expert_parallel.expert_ranks import ExpertRanks, TwoThreads
from strategies.models.expert_parallel.expert_shares import ExpertShares, HasExperts

__all__ = ["ExpertRanks", "ExpertShares", "HasExperts", "TwoThreads"]
