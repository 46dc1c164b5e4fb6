"""Chooses degrees, stage cut and schedule by simulating the programs that would run."""
