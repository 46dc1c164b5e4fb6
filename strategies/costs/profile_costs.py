"""Costs from a measurement: what units took on the machine at hand, put together per stage.

A stage takes what any stage takes, and what each of its units adds. What was not measured (links
between nodes, weights and optimizer state, rings of many ranks, tokens that travel to experts of
other ranks) is computed as analytic costs are, with the measured links in place of assumed ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from operator import add, sub

from strategies.costs.analytic import AnalyticCosts
from strategies.costs.hardware import Hardware
from strategies.costs.kernels import memory_bound
from strategies.costs.profile_file import Link, Profile, SizeProfile
from strategies.costs.table import CostTable, StageMemory, Transport
from strategies.costs.uniform import reduced_and_gathered
from strategies.errors import CostError
from strategies.ir.program import Program


@dataclass(frozen=True, slots=True)
class ProfiledCosts:
    """A profile, cut into stages.

    Attributes:
        stages: Per stage the classes of its units, as indices into ``profile.classes``.
        microbatch_size: Sequences.
        assumed: Everything that the profile does not know.
    """

    profile: Profile
    stages: tuple[tuple[int, ...], ...]
    microbatch_size: int
    assumed: AnalyticCosts

    def table(self, program: Program) -> CostTable:
        """Durations in seconds."""
        return self.table_for(program, *reduced_and_gathered(program, len(self.stages)))

    def table_for(
        self,
        program: Program,
        buckets: Sequence[int],
        gathered: frozenset[int],
        *,
        breakdown: bool = True,
    ) -> CostTable:
        """The table of a program that has no reductions yet; see ``AnalyticCosts.table_for``."""
        figures = self.profile.at(self.microbatch_size)
        links = self._with(self.profile.messages).table_for(program, buckets, gathered)
        reductions = self._with(self.profile.reductions).table_for(program, buckets, gathered)
        assert links.state_bytes is not None
        assert links.memory is not None
        memory = self._memory(figures, links.memory)

        there, whole, half = self._travelling()

        def sums(name: str, more: Sequence[float] | None = None) -> tuple[float, ...]:
            fixed: float = getattr(figures.fixed, name)
            each: list[float] = [getattr(unit.seconds, name) for unit in figures.units]
            found = (fixed + sum(each[kind] for kind in stage) for stage in self.stages)
            return tuple(found if more is None else map(add, found, more))

        return replace(
            links,
            name="profiled",
            forward=sums("forward", there),
            backward=sums("backward", whole),
            backward_input=sums("backward_input", half),
            backward_weight=sums("backward_weight"),
            recompute=sums("recompute", there),
            step=self._steps(program, sums("step"), gathered),
            reduce=reductions.reduce,
            gather=reductions.gather,
            activation_bytes=memory.activations,
            stage_input=tuple(
                min(1.0, kept / full) if full else 0.0
                for kept, full in zip(memory.inputs, memory.activations, strict=True)
            ),
            memory=memory if breakdown else None,
        )

    @property
    def handed(self) -> tuple[tuple[int, int, int], ...]:
        return self.assumed.handed

    @property
    def hardware(self) -> Hardware:
        return self.assumed.hardware

    @property
    def transport(self) -> Transport:
        return self.assumed.transport

    def _travelling(self) -> list[tuple[float, ...]]:
        """Per stage of an F, a B and an I, what tokens travel beyond what was measured (ep=1)."""
        spread = self._with(self.profile.messages)
        if spread.ep == 1:
            return [(0.0,) * len(self.stages)] * 3
        alone = replace(spread, ep=1)
        found = [
            map(sub, spread.passes.travelling(n), alone.passes.travelling(n)) for n in spread.stages
        ]
        return list(zip(*found, strict=True))

    def _with(self, link: Link | None) -> AnalyticCosts:
        """The assumptions, with a measured link between ranks of a node."""
        if link is None:
            return self.assumed
        hardware = replace(
            self.assumed.hardware, intra_bandwidth=link.bandwidth, intra_latency_s=link.latency_s
        )
        return replace(self.assumed, hardware=hardware)

    def _steps(
        self, program: Program, whole: tuple[float, ...], gathered: frozenset[int]
    ) -> tuple[float, ...]:
        """Updates, spread over replicas where weights are; and a rank's share of all the rest."""
        placement = program.placement
        steps, copied = [], self.assumed.copied_bytes(program)
        for stage, took in enumerate(whole):
            owners = placement.owners(stage)
            shares = len(owners) * self.assumed.dp if stage in gathered else 1
            load = self.assumed.stages[stage]
            if load.experts:
                took *= self.assumed.held(load) / load.parameters
            most = max(len(placement.stages_of(owner)) for owner in owners)
            took = took / shares + memory_bound(self.hardware, copied[stage])
            steps.append(took + self.profile.rest_s / most)
        return tuple(steps)

    def _memory(self, figures: SizeProfile, assumed: StageMemory) -> StageMemory:
        def of(name: str) -> list[list[int]]:
            each = [int(getattr(unit, name)) for unit in figures.units]
            return [[each[kind] for kind in stage] for stage in self.stages]

        made = [sizes[-1] if sizes else 0 for sizes in of("output_bytes")]
        # An empty stage hands on what it is given.
        for stage, units in enumerate(self.stages):
            if not units and stage:
                made[stage] = made[stage - 1]
        return replace(
            assumed,
            activations=tuple(map(sum, of("saved_bytes"))),
            waiting=tuple(map(sum, of("waiting_bytes"))),
            inputs=(0, *made[:-1]),
            outputs=(*made[:-1], 0),
            forward_temporaries=tuple(max(s, default=0) for s in of("forward_temporaries")),
            backward_temporaries=tuple(max(s, default=0) for s in of("backward_temporaries")),
        )


def stage_classes(
    profile: Profile, classes: Sequence[str], stages: Sequence[range]
) -> tuple[tuple[int, ...], ...]:
    """The cut of a model, whose units have these classes in order, in terms of a profile.

    Raises:
        CostError: The profile lacks a class.
    """
    known = {name: index for index, name in enumerate(profile.classes)}
    missing = sorted({name for name in classes if name not in known})
    if missing:
        raise CostError(
            f"the profile has no figures for {', '.join(missing)}, only for "
            f"{', '.join(profile.classes)}. Try mode=profile with this model."
        )
    return tuple(tuple(known[classes[unit]] for unit in stage) for stage in stages)
