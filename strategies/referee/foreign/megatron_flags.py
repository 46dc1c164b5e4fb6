"""Megatron-LM's schedule from its flags: a command line, or the script that has them.

A script is read and never run. ``PP=4`` is followed, so that ``--pipeline-model-parallel-size $PP``
is known; where a value is computed, or comes from elsewhere, the message says where it stands, and
``check.flags`` can give the number.

A layout string (``--pipeline-model-parallel-layout "Et*3|(tt|)*29,m|L"``) says per stage, first
chunk of all ranks first: E embedding, t decoder layer, m prediction of further tokens, L loss.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from strategies.errors import PlanError, ProgramError
from strategies.plan import ScheduleFile
from strategies.referee.foreign.megatron_order import interleaved
from strategies.referee.foreign.their_words import (
    Asked,
    Theirs,
    as_csv,
    check_size,
    place,
    shown,
    whole_number,
)
from strategies.referee.foreign.torch_order import one_f_one_b

# Every choice begins with another character and every repetition ends soon: no text takes long.
_VALUE = r"""("[^"\n]*"|'[^'\n]*'|\$\(\([^()\n]{0,200}\)\)|[^\s"'\\]+)"""
_FLAG = re.compile(r"(?<![\w-])--([a-z][a-z0-9_-]{0,80})(?:(?::[ \t]+|=|[ \t]+)" + _VALUE + ")?")
_SET = re.compile(r"(?m)^[ \t]{0,80}(?:export[ \t]+)?([A-Za-z_]\w{0,80})=" + _VALUE)
_NAME = re.compile(r"\$\{(\w{1,80})(?::-([^}\n]{0,200}))?\}|\$(\w{1,80})")
# What the length of a group in a layout string can come to.
_MOST_LAYERS = 100_000


def read_flags(text: str, asked: Asked, *, name: str) -> Theirs:
    """The order that Megatron-LM runs with these flags.

    Raises:
        PlanError: A flag is missing, unknown in value, or breaks a rule of Megatron's.
        ProgramError: The layout string has a letter that means nothing.
    """
    flags = _Flags(text, name)
    pp = flags.number("pipeline-model-parallel-size", usual=1)
    micro = flags.number("micro-batch-size")
    batch = flags.number("global-batch-size")
    replicas, how = _replicas(flags, asked, pp)
    if batch % (micro * replicas):
        raise PlanError(
            f"{flags.where('global-batch-size')}: --global-batch-size {batch} is no multiple of "
            f"--micro-batch-size {micro} times {replicas} replicas ({how}). Try "
            f"--global-batch-size {-(-batch // (micro * replicas)) * micro * replicas}."
        )
    count = batch // (micro * replicas)
    stages = flags.layout(pp)
    chunks = _chunks(flags, asked, pp, stages)
    layers = None if stages is None else tuple(stage.count("t") for stage in stages)
    total = flags.number("num-layers", usual=0, least=0)
    if layers is not None and total and sum(layers) != total:
        raise PlanError(
            f"{flags.where('pipeline-model-parallel-layout')}: the layout has {sum(layers)} "
            f"decoder layers (t), and --num-layers is {total}."
        )
    _check_layers(flags, pp, chunks, total, layers)
    check_size(2 * pp * chunks * count, name)
    notes = (f"{replicas} replicas ({how}), so {count} microbatches of {micro}",)
    if chunks == 1:
        rows, grouped, overlap = one_f_one_b(pp, count), True, False
        said = "1F1B, its exchanges grouped"
    else:
        group = _group(flags, pp, count)
        overlap = flags.on("overlap-p2p-communication", usual=True)
        grouped = not overlap
        rows = interleaved(pp, chunks, count, group, overlap=overlap)
        said = f"interleaved 1F1B, {chunks} chunks, groups of {group}, " + (
            "exchanges overlapped" if overlap else "exchanges grouped"
        )
    return Theirs(
        ScheduleFile(name, as_csv(rows)),
        "Megatron-LM",
        # With two ranks Megatron takes a communicator of its own for each direction.
        ("per_edge" if pp == 2 else "per_pair") if overlap else "one_queue",
        grouped,
        (said, *notes),
        layers,
    )


def _chunks(flags: _Flags, asked: Asked, pp: int, stages: tuple[str, ...] | None) -> int:
    """Model chunks per rank."""
    if stages is not None:
        return len(stages) // pp
    given = flags.number("num-virtual-stages-per-pipeline-rank", usual=0, least=0)
    if given:
        return given
    per_chunk = flags.number("num-layers-per-virtual-pipeline-stage", usual=0, least=0)
    if not per_chunk:
        return 1
    total = flags.number("num-layers", usual=asked.layers or 0, least=0)
    if not total:
        raise PlanError(
            f"{flags.where('num-layers-per-virtual-pipeline-stage')}: how many chunks that makes "
            "depends on --num-layers, which is not there. Try check.layers=32."
        )
    if total % (pp * per_chunk):
        raise PlanError(
            f"{flags.where('num-layers-per-virtual-pipeline-stage')}: --num-layers {total} is no "
            f"multiple of {pp} ranks times {per_chunk} layers. Try "
            f"--num-layers {-(-total // (pp * per_chunk)) * pp * per_chunk}."
        )
    return total // (pp * per_chunk)


def _check_layers(
    flags: _Flags, pp: int, chunks: int, total: int, layers: tuple[int, ...] | None
) -> None:
    """Whether every layer has a stage; with equal stages Megatron drops what is left over."""
    uneven = (
        "decoder-first-pipeline-num-layers",
        "decoder-last-pipeline-num-layers",
        "account-for-embedding-in-pipeline-split",
        "account-for-loss-in-pipeline-split",
    )
    if layers is not None or not total or any(flag in flags.found for flag in uneven):
        return
    if total % (pp * chunks):
        fit = -(-total // (pp * chunks)) * pp * chunks
        raise PlanError(
            f"{flags.where('num-layers')}: --num-layers {total} is no multiple of {pp} ranks"
            f"{f' times {chunks} chunks' if chunks > 1 else ''}: equal stages leave "
            f"{total % (pp * chunks)} out. Try --num-layers {fit}, or a "
            "--pipeline-model-parallel-layout."
        )


def _group(flags: _Flags, pp: int, count: int) -> int:
    """Microbatches that go through a chunk together, by Megatron's rules."""
    key = "microbatch-group-size-per-virtual-pipeline-stage"
    group = flags.number(key, usual=pp)
    where = flags.where(key)
    if not pp <= group <= max(count, pp):
        raise PlanError(
            f"{where}: --{key} {group} must lie between {pp} ranks and {count} microbatches. "
            f"Try --{key} {pp}."
        )
    rest = count % group
    if 0 < rest < pp or count < pp:
        fit = -(-count // pp) * pp
        raise PlanError(
            f"{where}: {count} microbatches in groups of {group} leave {rest or count}, fewer "
            f"than {pp} ranks, and a rank would wait for what comes after it. Try {fit} "
            "microbatches."
        )
    return group


def _replicas(flags: _Flags, asked: Asked, pp: int) -> tuple[int, str]:
    """Data-parallel replicas, and how they are known."""
    known = flags.number("data-parallel-size", usual=0, least=0)
    if known:
        return known, "--data-parallel-size"
    tp = flags.number("tensor-model-parallel-size", usual=1)
    cp = flags.number("context-parallel-size", usual=1)
    world, how = asked.num_gpus or 0, "check.num_gpus"
    if not world:
        world, how = flags.number("world-size", usual=0, least=0), "--world-size"
    if not world:
        world, how = flags.world()
    if not world:
        return 1, "taken for granted: check.num_gpus= says how many GPUs there are"
    if world % (tp * pp * cp):
        raise PlanError(
            f"{flags.name}: {world} GPUs ({how}) are no multiple of tp={tp} x pp={pp} x cp={cp}. "
            f"Try check.num_gpus={-(-world // (tp * pp * cp)) * tp * pp * cp}."
        )
    return world // (tp * pp * cp), f"{world} GPUs, {how}"


@dataclass(eq=False)
class _Flags:
    """Flags by name, the last of each, with the place where it stands."""

    text: str
    name: str
    found: dict[str, tuple[str | None, int]] = field(default_factory=dict)
    names: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        # A comment is blanked, so that places stay what an editor shows.
        bare = re.sub(r"(?m)(?:^|(?<=\s))#[^\n]*", lambda found: " " * len(found[0]), self.text)
        for match in _SET.finditer(bare):
            self.names[match[1]] = match[2].strip("\"'")
        for match in _FLAG.finditer(bare):
            value = match[2]
            if value is not None and value[0] not in "\"'" and value.count(")") > value.count("("):
                value = value.rstrip(")") or None  # It closes a list in the shell.
            if value is not None and value.startswith("-"):
                value = None
            self.found[match[1].replace("_", "-")] = (value, match.start())

    def where(self, flag: str) -> str:
        if flag not in self.found:
            return self.name
        return f"{self.name}, {place(self.text, self.found[flag][1])}"

    def on(self, flag: str, *, usual: bool) -> bool:
        if f"no-{flag}" in self.found:
            return False
        return True if flag in self.found else usual

    def number(self, flag: str, *, usual: int | None = None, least: int = 1) -> int:
        if flag not in self.found:
            if usual is None:
                raise PlanError(
                    f"{self.name}: --{flag} is not there, and the number of microbatches follows "
                    f"from it. Try check.flags='--{flag} 8'."
                )
            return usual
        value = self.found[flag][0]
        if value is None:
            raise PlanError(f"{self.where(flag)}: --{flag} has no value. Try --{flag} 8.")
        return whole_number(self._plain(value, flag), f"--{flag}", self.where(flag), least=least)

    def layout(self, pp: int) -> tuple[str, ...] | None:
        flag = "pipeline-model-parallel-layout"
        if flag not in self.found:
            return None
        value = self.found[flag][0]
        if not value:
            raise PlanError(f"{self.where(flag)}: --{flag} has no value. Try --{flag} 'Ett|ttL'.")
        stages = layout_stages(self._plain(value, flag), where=self.where(flag))
        if len(stages) % pp:
            raise PlanError(
                f"{self.where(flag)}: the layout has {len(stages)} stages, no multiple of "
                f"--pipeline-model-parallel-size {pp}."
            )
        return stages

    def world(self) -> tuple[int, str]:
        """GPUs, from what starts the ranks or from names that scripts use for it."""
        for key in ("WORLD_SIZE", "NUM_GPUS"):
            value = self._known(key)
            if value:
                return value, key
        each = 0
        for flag in ("nproc-per-node", "gpus-per-node", "ntasks-per-node"):
            if flag in self.found:
                each = self.number(flag)
        each = each or self._known("GPUS_PER_NODE")
        nodes = 0
        for flag in ("nnodes", "nodes", "num-nodes"):
            if flag in self.found:
                nodes = self.number(flag)
        nodes = nodes or self._known("NNODES") or self._known("NUM_NODES") or 1
        return each * nodes, f"{nodes} x {each}"

    def _known(self, key: str) -> int:
        if key not in self.names:
            return 0
        try:
            return whole_number(self._plain(self.names[key], key), key, self.name)
        except PlanError:
            return 0  # It is set elsewhere, or to no number.

    def _plain(self, value: str, flag: str) -> str:
        """A value with the names that the file sets filled in."""
        found = _NAME.sub(self._name, value.strip("\"'"))
        if "$" in found:
            raise PlanError(
                f"{self.where(flag)}: --{flag} is {shown(found)}, and the file says no value for "
                f"that. Try check.flags='--{flag} 8', which comes last."
            )
        return found

    def _name(self, match: re.Match[str]) -> str:
        found = self.names.get(match[1] or match[3], match[2])
        return match[0] if found is None else found


# ------------------------------------------------------------------------------------------ layout


def layout_stages(text: str, *, where: str) -> tuple[str, ...]:
    """What each stage of a layout string holds, a letter for a layer.

    Raises:
        ProgramError: A letter means nothing, a bracket does not close, or a rule is broken.

    >>> layout_stages("Et*2|(tt|)*2,L", where="layout")
    ('Ett', 'tt', 'tt', 'L')
    """
    for offset, letter in enumerate(text):
        if letter not in "EtmL|()*, 0123456789":
            raise ProgramError(
                f"{where}: column {offset + 1} of the layout is {shown(letter)}. It has E (the "
                "embedding), t (a layer), m (further tokens), L (the loss), | and (...)*n."
            )
    flat = text.replace(",", "").replace(" ", "")
    for pattern in (r"\(([^()]+)\)\*(\d{1,6})", r"([EtmL|])\*(\d{1,6})"):
        flat = re.sub(pattern, lambda match: _repeated(match, where), flat)
    if left := re.search(r"[()*\d]", flat):
        raise ProgramError(
            f"{where}: {shown(left[0])} of the layout stands for nothing: a repetition is t*3 or "
            "(tt|)*3, and brackets hold no others."
        )
    stages = tuple(flat.split("|"))
    for letter, word, right in (("E", "embedding", stages[0][:1]), ("L", "loss", stages[-1][-1:])):
        if flat.count(letter) != 1 or right != letter:
            end = "first" if letter == "E" else "last"
            raise ProgramError(
                f"{where}: the layout has {flat.count(letter)} {letter} ({word}); it stands once, "
                f"{end} of all. Try 'Ett|ttL'."
            )
    return stages


def _repeated(match: re.Match[str], where: str) -> str:
    if len(match[1]) * int(match[2]) > _MOST_LAYERS:
        raise ProgramError(f"{where}: {shown(match[0])} makes more than {_MOST_LAYERS} layers.")
    return match[1] * int(match[2])


def has_flags(text: str) -> bool:
    """Whether a text speaks of a pipeline in Megatron's words."""
    return "--pipeline-model-parallel-" in text
