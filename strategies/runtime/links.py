"""Between which stages tensors travel, from both ends."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from strategies.ir.program import Program
from strategies.runtime.stage_model import StageOutput


@dataclass(frozen=True, slots=True)
class Links:
    """A program's boundaries.

    Attributes:
        sources: Per stage the stages that hand it tensors, the earliest first.
        targets: Per stage those that it hands tensors to, the earliest first.
    """

    sources: tuple[tuple[int, ...], ...]
    targets: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, program: Program) -> Links:
        """Reads them off."""
        stages = range(program.placement.num_stages)
        ends = sorted((boundary.source, boundary.target) for boundary in program.boundaries)
        return cls(
            tuple(tuple(source for source, target in ends if target == stage) for stage in stages),
            tuple(tuple(target for source, target in ends if source == stage) for stage in stages),
        )

    def deal(self, stage: int, output: StageOutput) -> list[tuple[int, tuple[Tensor, ...]]]:
        """A stage's tensors by the stage that they are for; none for some, perhaps."""
        groups = output.groups
        counts = {stage + 1: len(output.tensors)} if groups is None else dict(groups)
        dealt = []
        position = 0
        for target in self.targets[stage]:
            end = position + counts.pop(target, 0)
            dealt.append((target, output.tensors[position:end]))
            position = end
        assert not counts, f"stage {stage} has tensors for {sorted(counts)}, which no message takes"
        return dealt
