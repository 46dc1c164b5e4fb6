"""Plans that one rank sees differently from all others, drawn at random; runs on test ranks.

Order and tag change the program that the rank has compiled; size and type its weights, its batch
or what its gradients travel as.
"""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from strategies.compiler import Programs
from strategies.errors import PipelineError
from strategies.ir.instruction import Instruction
from strategies.ir.kinds import MESSAGE_KINDS
from strategies.ir.program import Program
from strategies.runtime.engine import rank_setup
from tests.ranks.fit import trainer_of
from tests.ranks.training import Learner, Sentences, small_shape

KINDS = ("order", "tag", "size", "type")


class _Wide(Sentences):
    """The same sentences in another type, or cut shorter."""

    def __init__(self, count: int, *, shorter: bool) -> None:
        super().__init__(count)
        self._shorter = shorter

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        item = super().__getitem__(index)
        if self._shorter:
            return {name: row[:-1] for name, row in item.items()}
        return {name: row.to(torch.int32) for name, row in item.items()}


def fit_mutated(seed: int, kind: str, victim: int, pp: int, dp: int) -> tuple[str, int]:
    """One training with one mutated rank.

    Returns:
        What this rank raised, and how many steps it had made.
    """
    generator = random.Random(seed)
    changed = torch.distributed.get_rank() == victim
    shape, data, wire = small_shape(), Sentences(64), "fp32"
    compile_plan = rank_setup.compile_plan
    if changed and kind in ("order", "tag"):

        def compile_plan(plan: Any) -> Programs:
            programs = engine_compile(plan)
            mutate = _swapped if kind == "order" else _retagged
            return replace(programs, train=mutate(programs.train, generator))

    elif changed and kind == "size":
        if generator.random() < 0.5:
            shape = small_shape(ffn=generator.choice([8, 16, 20]))
        else:
            data = _Wide(64, shorter=True)
    elif changed:
        what = generator.choice(["batch", "gradients", "weights"])
        if what == "batch":
            data = _Wide(64, shorter=False)
        elif what == "gradients":
            wire = "bf16"
    precision = "64-true"
    if changed and kind == "type" and what == "weights":
        precision = "32-true"
    strategy = {
        "pp": pp, "dp": dp, "num_microbatches": 4, "timeout_s": 20, "seed": 0,
        "grad_dtype": wire, "check_batches": False,
    }  # fmt: skip
    trainer = trainer_of(strategy, max_steps=2, precision=precision)
    with mock.patch.object(rank_setup, "compile_plan", compile_plan):
        try:
            trainer.fit(Learner(shape), DataLoader(data, batch_size=8))
        except PipelineError as error:
            return f"{type(error).__name__}: {error}", trainer.global_step
    return "no error", trainer.global_step


engine_compile = rank_setup.compile_plan


def _swapped(program: Program, generator: random.Random) -> Program:
    """Two neighbours of one rank's list that differ change places."""
    rank = generator.randrange(len(program.ranks))
    row = list(program.ranks[rank])
    places = [p for p in range(len(row) - 1) if row[p] != row[p + 1]]
    place = generator.choice(places)
    row[place], row[place + 1] = row[place + 1], row[place]
    return _with_row(program, rank, row)


def _retagged(program: Program, generator: random.Random) -> Program:
    """A message says that it is another microbatch's, or goes to another stage."""
    rank = generator.randrange(len(program.ranks))
    row = list(program.ranks[rank])
    places = [p for p, item in enumerate(row) if item.kind in MESSAGE_KINDS]
    place = generator.choice(places)
    item = row[place]
    assert item.microbatch is not None
    other = (item.microbatch + generator.randrange(1, program.num_microbatches)) % (
        program.num_microbatches
    )
    row[place] = replace(item, microbatch=other)
    return _with_row(program, rank, row)


def _with_row(program: Program, rank: int, row: list[Instruction]) -> Program:
    rows = [tuple(row) if r == rank else old for r, old in enumerate(program.ranks)]
    return replace(program, ranks=tuple(rows))
