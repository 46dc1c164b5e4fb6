"""What the units of a model take on one rank, as the cost model and the planner count it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, TypeVar

from launcher.workloads.hf.hf_layer_steps import hf_steps, type_names
from launcher.workloads.hf.hf_shape import HfShape
from launcher.workloads.layer_steps import UNIT_TYPES, Step, kept, unit_steps, unit_types
from launcher.workloads.model_share import ModelShape, PlannedShape, model_shares, model_units
from launcher.workloads.traced_shape import TracedShape
from launcher.workloads.transformer_shape import TransformerShape
from launcher.workloads.transformer_share import expert_part, padded_vocab
from launcher.workloads.unit_kernels import SORTING, computing_again, unit_works, update_products
from strategies.costs.kernels import Attention, Work
from strategies.costs.load import Load
from strategies.errors import PlanError
from strategies.plan import FAMILIES, Family


def unit_loads(
    shape: PlannedShape,
    tp: int,
    microbatch_size: int,
    *,
    sequence_parallel: bool = False,
    selective: bool = False,
    whole_layers: bool = False,
    layers: Layers = (),
    attention: Attention = "fused",
    ns_steps: int = 0,
    gpu_element: int | None = None,
    expert_tp: bool = False,
) -> tuple[Load, ...]:
    """One load per unit, in execution order.

    With ``selective`` layers recompute what is cheap, or of the types in ``layers`` those families;
    with ``whole_layers``, too, all of it from their input.
    With ``ns_steps`` the optimizer is Muon, with so many steps per update: it keeps one element per
    parameter between the first and the last unit (norms and biases count with the matrices), and
    computes of each matrix; of a trace nobody knows which those are.
    ``gpu_element``: bytes of an activation on a GPU, whose kernels keep less than those of a CPU.
    With ``expert_tp`` each rank has a share of every expert's matrices, instead of whole ones.
    """
    if expert_tp and isinstance(shape, TransformerShape) and shape.moe is not None:
        whole = unit_loads(
            shape, tp, microbatch_size, selective=selective, whole_layers=whole_layers,
            layers=layers, attention=attention, ns_steps=ns_steps,
            gpu_element=gpu_element,
        )  # fmt: skip
        return tuple(_sliced(shape, load, tp, microbatch_size) for load in whole)
    if isinstance(shape, TracedShape):
        return shape.loads(microbatch_size, tp, selective=selective)
    units = model_units(shape)
    shares = model_shares(shape, tp, sequence_parallel=sequence_parallel)
    stream = shape.sequence * shape.hidden * microbatch_size
    loads = tuple(
        Load(
            unit.forward_flops * microbatch_size,
            unit.parameters,
            0,
            unit.saved_elements * microbatch_size,
            (stream,) * unit.forward_sums,
            (stream,) * unit.backward_sums,
            owns=(0,) if number == 0 else (),
            # Tied is the embedding's matrix, which tensor-parallel ranks share.
            tied=((0, spec.tied_parameters // tp),) if spec.tied_parameters else (),
            lean_parameters=(unit.parameters if ns_steps and 0 < number < len(units) - 1 else 0),
            **_of_experts(shape, number, tp, microbatch_size),
        )
        for number, (spec, unit) in enumerate(zip(units, shares, strict=True))
    )
    # Experts are tensors of three dimensions, which are no matrices.
    loads = _mapped(_without_experts, _one_each(loads))
    if gpu_element is not None and isinstance(shape, TransformerShape):
        loads = _as_gpus_keep(shape, loads, tp, stream, gpu_element, cut=sequence_parallel)
    if not isinstance(shape, HfShape) or shape.sizes is not None:
        different = unit_works(
            shape, tp, microbatch_size, sequence_parallel=sequence_parallel, attention=attention
        )
        loads = _mapped(_with_kernels, loads, _each(different, len(loads)))
    if ns_steps and (not isinstance(shape, HfShape) or shape.sizes is not None):
        computed = _each(update_products(shape, ns_steps), len(loads))
        loads = tuple(
            replace(load, update_products=tuple(Counter(products).items()))
            for load, products in zip(loads, computed, strict=True)
        )
    if selective and whole_layers:
        cut = tp if sequence_parallel else 1
        loads = _layers_again(shape, loads, tp, stream // cut, microbatch_size)
    elif selective:
        kept = selective_shares(shape, tp, sequence_parallel=sequence_parallel, layers=layers)
        loads = _mapped(lambda load, share: _again(load, share, microbatch_size), loads, kept)
    # Last, as layers with experts that are alike hand on more and more: losses travel along.
    return _handing_on(loads, [unit.output_elements * microbatch_size for unit in shares])


def _one_each(loads: Sequence[Load]) -> tuple[Load, ...]:
    """One object for equal ones."""
    known: dict[Load, Load] = {}
    return tuple(known.setdefault(load, load) for load in loads)


def _handing_on(loads: Sequence[Load], elements: Sequence[int]) -> tuple[Load, ...]:
    made: dict[tuple[int, int], Load] = {}
    for load, count in zip(loads, elements, strict=True):
        if (id(load), count) not in made:
            made[id(load), count] = replace(load, output_elements=count)
    return tuple(made[id(load), count] for load, count in zip(loads, elements, strict=True))


def _mapped(change: Callable[..., Load], *columns: Sequence[object]) -> tuple[Load, ...]:
    """What a change makes of each row; of rows of the same objects, as layers are, it is one."""
    made: dict[tuple[int, ...], Load] = {}
    found = []
    for row in zip(*columns, strict=True):
        key = tuple(map(id, row))
        if key not in made:
            made[key] = change(*row)
        found.append(made[key])
    return tuple(found)


def _without_experts(load: Load) -> Load:
    return replace(load, lean_parameters=max(0, load.lean_parameters - load.experts))


def _as_gpus_keep(
    shape: TransformerShape, loads: Sequence[Load], tp: int, stream: int, size: int, *, cut: bool
) -> tuple[Load, ...]:
    """RMSNorm is one kernel that keeps its input alone; dropout keeps a mask of bytes.

    Where the stream is cut over ranks, a mask is a share of a larger one, of whole elements.
    """
    copy = stream // (tp if cut else 1) if shape.norm == "rmsnorm" else 0
    mask = stream * (size - 1) // size if shape.dropout and not cut else 0
    last = len(loads) - 1
    given_up = [(copy if n else 0) + (mask if n < last else 0) for n in range(len(loads))]
    sizes = {size: size for size in given_up}  # one object of each

    def without(load: Load, elements: int) -> Load:
        return replace(load, saved_elements=load.saved_elements - elements)

    return _mapped(without, loads, [sizes[size] for size in given_up])


def _of_experts(shape: ModelShape, number: int, tp: int, size: int) -> dict[str, Any]:
    """What a unit has of experts; none of most."""
    if not isinstance(shape, TransformerShape) or shape.moe is None or number % 2:
        return {}
    if not shape.moe.has_experts(number // 2 - 1):
        return {}
    part, moe = expert_part(shape), shape.moe
    matrices = (3 if shape.activation == "swiglu" else 2) * shape.hidden * moe.ffn
    shared = 2.0 * shape.sequence * matrices * moe.shared
    return {
        "experts": part.parameters,
        "expert_flops": part.forward_flops * size / tp,
        "expert_saved": part.saved_elements * size // tp,
        "exchanged": (part.exchanged * size,),
        "beside_flops": shared * size / tp,
    }


def _sliced(shape: TransformerShape, load: Load, tp: int, size: int) -> Load:
    """A unit of which a rank has a share of each expert, and computes all tokens with it."""
    moe = shape.moe
    if not load.exchanged:
        return load
    assert moe is not None
    rows, inner = shape.sequence * moe.per_token * size, moe.ffn // tp
    kept = rows * (shape.hidden + (4 if shape.activation == "swiglu" else 2) * inner)
    more = kept - load.expert_saved if load.expert_saved else 0
    stream = shape.sequence * shape.hidden * size
    ((work, count),) = load.works
    wide, narrow = work.experts
    group = max(1, rows // moe.experts)
    experts = (
        wide._replace(rows=group, columns=wide.columns // tp),
        narrow._replace(rows=group, inner=inner),
    )
    # All choices of all tokens are sorted on each rank, instead of a share of them.
    forward, backward = (n * (rows - rows // tp) * shape.hidden for n in SORTING)
    work = replace(
        work,
        experts=experts,
        forward_elements=work.forward_elements + forward,
        backward_elements=work.backward_elements + backward,
    )
    return replace(
        load,
        saved_elements=load.saved_elements + more,
        expert_saved=load.expert_saved + more,
        forward_sums=(*load.forward_sums, stream),
        backward_sums=(*load.backward_sums, stream),
        works=((work, count),),
    )


def _each(different: Sequence[T], count: int) -> list[T]:
    """Per unit; what lies between the first and the last comes again with each layer."""
    first, *middle, last = different
    return [first, *(middle[number % len(middle)] for number in range(count - 2)), last]


def _with_kernels(load: Load, work: Work) -> Load:
    scores = 0 if work.core is None else work.core.kept_elements
    return replace(load, works=((work, 1),), saved_elements=load.saved_elements + scores)


def _again(load: Load, share: SelectiveShare, microbatch_size: int) -> Load:
    flops = share.again_flops * microbatch_size
    works = tuple((computing_again(w, share.families, flops), n) for w, n in load.works)
    scores = sum(
        n * w.core.kept_elements for w, n in works if w.core is not None and not w.again_core
    )
    return replace(
        load,
        saved_elements=share.saved_elements * microbatch_size + scores,
        again_flops=flops,
        works=works,
    )


# ------------------------------------------------------------------------------------ whole layers
# Each keeps its input and is run again in its backward, up to the last tensor that a gradient
# needs: the product at its end does not run again, but for the mask of a dropout behind it.


def _layers_again(
    shape: ModelShape, loads: Sequence[Load], tp: int, stream: int, microbatch_size: int
) -> tuple[Load, ...]:
    """``stream``: elements of a layer's input."""
    first, *middle, head = loads
    loss = shape.sequence * (padded_vocab(shape.vocab, tp) // tp + 1) * microbatch_size
    ids = shape.sequence * microbatch_size
    size = len(middle) // shape.layers  # units of a layer
    whole = [
        sum(load.saved_elements for load in middle[i : i + size]) - stream
        for i in range(0, len(middle), size)
    ]
    masked = _drops_branches(shape)
    again = [
        _run_again(load, ends=i % size == size - 1 and not masked) for i, load in enumerate(middle)
    ]
    return (
        _keeping(first, ids, 0, first.saved_elements - ids),
        *(
            _keeping(load, 0 if i % size else stream, stream if i % size else 0, whole[i // size])
            for i, load in enumerate(again)
        ),
        _keeping(head, stream + loss, 0, head.saved_elements - stream - loss),
    )


def _keeping(load: Load, kept: int, first: int, rebuilt: int) -> Load:
    return replace(
        load,
        again_exchanged=load.exchanged,
        expert_saved=0,
        saved_elements=kept,
        first_saved_elements=first,
        rebuilt_elements=rebuilt,
        waiting_elements=load.saved_elements,
    )


def _drops_branches(shape: ModelShape) -> bool:
    if isinstance(shape, HfShape):
        return shape.sizes is not None and shape.sizes.residual_dropout
    return bool(shape.dropout)


def _run_again(load: Load, *, ends: bool) -> Load:
    """A unit of a layer; ``ends``: its last product is not needed."""
    flops = load.forward_flops
    sums = load.forward_sums
    if ends:
        products = [
            product for work, _ in load.works for product in (*work.products, *work.experts)
        ]
        flops -= products[-1].flops if products else 0.0
        sums = sums[:-1]
    works = tuple((computing_again(w, FAMILIES, flops), n) for w, n in load.works)
    return replace(load, again_flops=flops, again_sums=sums, works=works)


# --------------------------------------------------------------------------------------- selective
# Everything but products with weights is computed again where ``recompute.layers`` does not say
# otherwise. The loss is no layer; its share stays.


_DEFAULT: tuple[Family, ...] = ("attention", "norm", "activation")

T = TypeVar("T")
Layers = Sequence[tuple[str, tuple[Family, ...]]]


class SelectiveShare(NamedTuple):
    """One unit on one of ``tp`` ranks, per sequence."""

    saved_elements: int  # kept from forward to backward
    again_flops: float  # of products that a backward computes again
    families: tuple[Family, ...] = ()  # what of it is computed again


def selective_shares(
    shape: ModelShape, tp: int, *, sequence_parallel: bool = False, layers: Layers = ()
) -> tuple[SelectiveShare, ...]:
    """The units in execution order, on one of ``tp`` ranks.

    ``layers`` are types of layers and the families that are computed again there.
    """
    if isinstance(shape, HfShape):
        kinds = type_names(shape)
        # Types that only the ranks know are theirs to refuse.
        _check_names(layers, kinds, all_known=len(kinds[1]) > 1)
        first, layer, head = (
            _share(steps, names, layers)
            for steps, names in zip(hf_steps(shape, tp), kinds, strict=True)
        )
        middle = [layer] * shape.layers
    else:
        there = dict.fromkeys(unit_types(shape))
        _check_names(layers, tuple((name,) for name in there), all_known=True)
        steps = unit_steps(shape, tp, sequence_parallel=sequence_parallel)
        shares = {name: _share(steps[name], (name,), layers) for name in UNIT_TYPES}
        first, *middle, head = (shares[name] for name in unit_types(shape))
    ids = padded_vocab(shape.vocab, tp) // tp
    loss = shape.sequence * (ids + 1)
    return (first, *middle, head._replace(saved_elements=head.saved_elements + loss))


def _share(steps: Sequence[Step], names: Sequence[str], layers: Layers) -> SelectiveShare:
    asked = dict(layers)
    families = next((asked[name] for name in names if name in asked), _DEFAULT)
    return SelectiveShare(*kept(steps, families), families)


def _check_names(layers: Layers, kinds: Sequence[Sequence[str]], *, all_known: bool) -> None:
    known = {name for names in kinds for name in names}
    for name, families in layers:
        if all_known and name not in known:
            fix = f"{sorted(known)[0]}:{'+'.join(families) or 'none'}"
            raise PlanError(
                f"recompute.layers names {name}, but the model's layers are of the types "
                f"{', '.join(sorted(known))}. Try recompute.layers=[{fix}]."
            )
