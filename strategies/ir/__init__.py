"""The instruction set: what a program is, how it is written down, and when it is correct."""

from strategies.ir.instruction import Instruction
from strategies.ir.kinds import Kind
from strategies.ir.program import Boundary, Placement, Program
from strategies.ir.text import format_instruction, parse_instruction
from strategies.ir.verify import verify

__all__ = [
    "Boundary",
    "Instruction",
    "Kind",
    "Placement",
    "Program",
    "format_instruction",
    "parse_instruction",
    "verify",
]
