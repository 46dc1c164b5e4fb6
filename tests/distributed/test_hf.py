"""Hugging Face models on several ranks train as transformers trains them, in fp64."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModelForCausalLM

from launcher.workloads.hf.export import export_checkpoint, library_name
from strategies.errors import ModelError
from strategies.models.tensor_parallel import sharded_layers
from strategies.plan import Policy
from tests.ranks.hf_training import HfCase, balanced_reference, reference, train_hf, train_own
from tests.ranks.pool import Ranks
from tests.tiny_models import batch_of, shape_of, write_model

TOLERANCE = 1e-8

pytestmark = pytest.mark.distributed

NO_DROPOUT = {"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0}


@pytest.mark.parametrize(
    ("family", "changes", "schedule", "padded", "recompute"),
    [
        pytest.param("llama", {}, "1f1b", False, "none", marks=pytest.mark.full),
        pytest.param(
            "llama",
            {"tie_word_embeddings": True},
            "interleaved_1f1b",
            True,
            "none",
            marks=pytest.mark.full,
        ),
        ("gpt2", NO_DROPOUT, "foldx_fifo", False, "none"),
        ("qwen2", {}, "zb_h1", True, "none"),
        ("qwen3", {"tie_word_embeddings": True}, "1f1b", False, "none"),
        pytest.param("llama", {}, "zb_h1", True, "full", marks=pytest.mark.full),
        pytest.param("gpt2", NO_DROPOUT, "1f1b", False, "selective", marks=pytest.mark.full),
        ("llama", {}, "zb_h1", True, "selective"),
    ],
    ids=[
        "llama",
        "llama-tied-padded",
        "gpt2",
        "qwen2-padded",
        "qwen3-tied",
        "llama-recomputed",
        "gpt2-selective",
        "llama-split-selective",
    ],
)
def test_two_ranks_train_as_transformers_does(
    family: str,
    changes: dict[str, object],
    schedule: str,
    padded: bool,
    recompute: Policy,
    ranks: Callable[[int], Ranks],
    tmp_path: Path,
) -> None:
    model = write_model(tmp_path, family, **changes)
    case = HfCase(str(tmp_path), schedule=schedule, padded=padded, recompute=recompute)
    losses = reference(model, case)
    results = ranks(2).run(train_hf, case=case)
    expected = dict(model.named_parameters(remove_duplicate=False))
    seen = set()
    for result in results:
        assert result["losses"] == pytest.approx(losses, abs=TOLERANCE)
        for name, value in result["parameters"].items():
            theirs = library_name(name)
            seen.add(theirs)
            assert (value - expected[theirs]).abs().max().item() < TOLERANCE, name
    assert seen >= {name for name, _ in model.named_parameters()}


@pytest.mark.parametrize(
    ("family", "changes", "schedule", "padded"),
    [
        pytest.param("llama", {}, "1f1b", True, marks=pytest.mark.full),
        pytest.param(
            *("llama", {"tie_word_embeddings": True, "pad_token_id": 3}, "zb_h1", False),
            marks=pytest.mark.full,
        ),
        pytest.param("qwen3", {}, "1f1b", False, marks=pytest.mark.full),
        pytest.param("gpt_neox", {}, "1f1b", False, marks=pytest.mark.full),
    ],
    ids=["llama-padded", "llama-tied", "qwen3", "gpt_neox"],
)
def test_two_stages_on_two_sharers_each_train_as_transformers_does(
    family: str,
    changes: dict[str, object],
    schedule: str,
    padded: bool,
    ranks: Callable[[int], Ranks],
    tmp_path: Path,
) -> None:
    model = write_model(tmp_path, family, **changes)
    saved = tmp_path / "saved.ckpt"
    case = HfCase(str(tmp_path), schedule=schedule, padded=padded, tp=2, save=str(saved))
    losses = reference(model, case)
    expected = dict(model.named_parameters(remove_duplicate=False))
    seen = set()
    cut = set()
    for rank, result in enumerate(ranks(4).run(train_hf, case=case)):
        assert result["losses"] == pytest.approx(losses, abs=TOLERANCE)
        for name, value in result["parameters"].items():
            theirs = library_name(name)
            seen.add(theirs)
            whole = expected[theirs]
            shard = result["shards"].get(name)
            if shard is not None:
                cut.add(theirs.rpartition(".")[0].rpartition(".")[2])
                whole = shard.local(whole.detach(), rank % 2)
            assert (value - whole).abs().max().item() < TOLERANCE, name
    assert seen >= {name for name, _ in model.named_parameters()}
    if family == "gpt_neox":
        assert cut >= {"query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h", "embed_in"}
    else:
        assert cut >= {"embed_tokens", "q_proj", "k_proj", "o_proj", "gate_proj", "down_proj"}
    _exported_equals(model, saved, tmp_path)


# In all kinds of order; tensors of the last ones are renamed or merged while they are read.
FAMILIES = (
    "llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text", "phi3", "gpt2", "opt",
    "falcon", "olmo2", "granite", "stablelm", "phi", "bloom", "gpt_neo", "gptj", "cohere",
    "smollm3", "glm4", "starcoder2", "exaone4", "lfm2", "mamba", "llama4_text", "dbrx", "gpt_oss",
    "gpt_neox", "mixtral", "deepseek_v2", "deepseek_v3", "qwen2_moe", "qwen3_moe", "olmoe",
    "granitemoe", "minimax", "minimax_m2", "ernie4_5_moe", "jamba",
)  # fmt: skip
EVERYDAY = [("gpt_neox", "1f1b"), ("mixtral", "zb_v")]
# Parts of these (norms, routers, rotary tables) are computed in single precision whatever the
# weights are, and a microbatch is rounded otherwise than a batch.
ROUNDED = 2e-6


@pytest.mark.parametrize(
    ("family", "schedule"),
    [
        *EVERYDAY,
        *(
            pytest.param(family, schedule, marks=pytest.mark.full)
            for family in FAMILIES
            for schedule in ("1f1b", "zb_v")
            if (family, schedule) not in EVERYDAY
        ),
    ],
)
def test_a_family_trains_and_is_exported_as_transformers_does_it(
    family: str, schedule: str, ranks: Callable[[int], Ranks], tmp_path: Path
) -> None:
    changes = {"gpt2": NO_DROPOUT, "opt": {"dropout": 0.0}}.get(family, {})
    model = write_model(tmp_path / "model", family, **changes)
    saved = tmp_path / "saved.ckpt"
    case = HfCase(str(tmp_path / "model"), schedule=schedule, save=str(saved))
    model.train()
    losses = reference(model, case)
    for result in ranks(2).run(train_hf, case=case):
        assert result["losses"] == pytest.approx(losses, abs=ROUNDED)
    export_checkpoint(saved, shape_of(tmp_path / "model"), tmp_path / "out")
    stored, written = (
        {name: value.shape for name, value in load_file(folder / "model.safetensors").items()}
        for folder in (tmp_path / "model", tmp_path / "out")
    )
    assert written == stored
    again, report = AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", output_loading_info=True, experts_implementation="eager"
    )
    assert not any(report.values()), report
    tokens = batch_of(2)["tokens"]
    with torch.no_grad():
        theirs = model.eval()(tokens, use_cache=False).logits
        difference = again.eval()(tokens, use_cache=False).logits - theirs
    assert difference.abs().max().item() < 1e-4


@pytest.mark.parametrize(
    ("family", "schedule", "padded"),
    [
        ("mixtral", "zb_v", True),
        pytest.param("granitemoe", "1f1b", False, marks=pytest.mark.full),
        *(
            pytest.param(family, schedule, padded, marks=pytest.mark.full)
            for family in ("qwen3_moe", "olmoe", "gpt_oss", "qwen2_moe", "ernie4_5_moe", "jamba")
            for schedule, padded in (("1f1b", True), ("zb_v", False))
        ),
    ],
)
def test_the_balance_of_routers_is_the_librarys(
    family: str, schedule: str, padded: bool, ranks: Callable[[int], Ranks], tmp_path: Path
) -> None:
    loss = {"output_router_logits": True, "router_aux_loss_coef": 0.5}
    model = write_model(tmp_path / "model", family, **loss)
    saved = tmp_path / "saved.ckpt"
    case = HfCase(str(tmp_path / "model"), schedule=schedule, padded=padded, save=str(saved))
    losses = balanced_reference(model.train(), case)
    trained = {library_name(n): p for n, p in model.named_parameters()}
    for result in ranks(2).run(train_hf, case=case):
        assert result["losses"] == pytest.approx(losses, abs=ROUNDED)
        for name, value in result["parameters"].items():
            difference = (value - trained[library_name(name)]).abs().max().item()
            assert difference < 1e-4, name  # Adam makes much of gradients near 0
    export_checkpoint(saved, shape_of(tmp_path / "model"), tmp_path / "out")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "out", experts_implementation="eager")
    assert again.config.output_router_logits
    tokens = batch_of(2)["tokens"]
    with torch.no_grad():
        theirs, ours = (m.eval()(tokens, use_cache=False) for m in (model, again))
    assert (theirs.logits - ours.logits).abs().max().item() < 1e-4
    assert float(theirs.aux_loss) == pytest.approx(float(ours.aux_loss), abs=1e-5)


# Experts over two replicas of each stage, with the library's balance loss where it has one.
SPREAD = (
    "mixtral", "qwen3_moe", "deepseek_v2", "deepseek_v3", "granitemoe", "olmoe", "gpt_oss",
    "qwen2_moe", "ernie4_5_moe", "minimax", "minimax_m2", "jamba", "glm4_moe", "hunyuan_v1_moe",
)  # fmt: skip


@pytest.mark.parametrize(
    ("family", "more"),
    [
        ("gpt_oss", {"schedule": "zb_v"}),
        *(pytest.param(family, {"padded": True}, marks=pytest.mark.full) for family in SPREAD),
        *(
            pytest.param("mixtral", more, marks=pytest.mark.full)
            for more in (
                {"schedule": "foldx_fifo", "recompute": "full"},
                {"schedule": "eager_1f1b", "pairs": True},
                {"schedule": "zb_h1", "recompute": "selective"},
                {"overlap": "zero1"},
            )
        ),
        # The same two ranks have halves of the matrices around experts, and halves of these.
        pytest.param("mixtral", {"dp": 2, "tp": 2, "pp": 1}, marks=pytest.mark.full),
        pytest.param("mixtral", {"dp": 1, "tp": 2, "pp": 1}, marks=pytest.mark.full),
        pytest.param("mixtral", {"dp": 2, "tp": 2, "ep": 4, "pp": 1}, marks=pytest.mark.full),
        *(
            pytest.param(family, {"dp": 1, "tp": 2}, marks=pytest.mark.full)
            for family in SPREAD[:7]
        ),
    ],
)
def test_experts_of_a_family_over_ranks_train_as_transformers_does_it(
    family: str, more: dict[str, Any], ranks: Callable[[int], Ranks], tmp_path: Path
) -> None:
    loss = {"output_router_logits": True, "router_aux_loss_coef": 0.5}
    model = write_model(tmp_path / "model", family, **loss)
    saved = tmp_path / "saved.ckpt"
    case = HfCase(str(tmp_path / "model"), save=str(saved), **{"dp": 2, "ep": 2, **more})
    losses = balanced_reference(model.train(), case)
    trained = dict(model.named_parameters(remove_duplicate=False))
    results = ranks(case.pp * case.dp * case.tp).run(train_hf, case=case)
    shares = set()
    for result in results:
        same = [other["losses"] for other in results if other["pp_rank"] == result["pp_rank"]]
        means = [sum(pair) / len(same) for pair in zip(*same, strict=True)]
        assert means == pytest.approx(losses, abs=ROUNDED)
        whole = {library_name(name): value for name, value in result["whole"].items()}
        for name, value in trained.items():
            difference = (whole[name] - value).abs().max().item()
            assert difference < 1e-4, name  # Adam makes much of gradients near 0
        parameters = result["parameters"].items()
        shares |= {len(v) for name, v in parameters if ".experts." in name and v.dim() == 3}
    assert shares == {4 // case.ep}, "a rank holds its share of the four"
    export_checkpoint(saved, shape_of(tmp_path / "model"), tmp_path / "out")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "out", experts_implementation="eager")
    tokens = batch_of(2)["tokens"]
    with torch.no_grad():
        theirs, ours = (m.eval()(tokens, use_cache=False) for m in (model, again))
    assert (theirs.logits - ours.logits).abs().max().item() < 1e-4


@pytest.mark.full
@pytest.mark.parametrize("schedule", [pytest.param("1f1b", marks=pytest.mark.full), "zb_v"])
def test_a_family_whose_routers_draw_in_training_draws_the_same_at_any_cut(
    schedule: str, ranks: Callable[[int], Ranks], tmp_path: Path
) -> None:
    loss = {"output_router_logits": True, "router_aux_loss_coef": 0.5, "router_jitter_noise": 0.5}
    write_model(tmp_path, "phimoe", **loss)
    case = HfCase(str(tmp_path), schedule=schedule, padded=True, recompute="full")
    (whole,) = ranks(1).run(train_hf, case=HfCase(str(tmp_path), pp=1, padded=True))
    for result in ranks(2).run(train_hf, case=case):
        assert result["losses"] == pytest.approx(whole["losses"], abs=TOLERANCE)


@pytest.mark.parametrize(
    ("family", "schedule"),
    [
        ("qwen3_moe", "zb_h1"),
        *(
            pytest.param(family, "1f1b", marks=pytest.mark.full)
            for family in ("mixtral", "olmoe", "granitemoe", "gpt_oss", "deepseek_v3")
        ),
    ],
)
def test_a_module_that_returns_the_librarys_loss_has_the_balance_of_all_its_layers(
    family: str, schedule: str, ranks: Callable[[int], Ranks]
) -> None:
    cut = ranks(2).run(train_own, family=family, schedule=schedule, pp=2)
    (whole,) = ranks(1).run(train_own, family=family, schedule=schedule, pp=1)
    assert (whole["balance"] is None) == (family == "deepseek_v3")  # which has no such loss
    for result in cut:
        assert result["losses"] == pytest.approx(whole["losses"], abs=TOLERANCE)
        assert result["balance"] == pytest.approx(whole["balance"], abs=TOLERANCE)


def _exported_equals(model: nn.Module, saved: Path, folder: Path) -> None:
    """What transformers makes of the export gives the logits of the model it trained itself."""
    export_checkpoint(saved, shape_of(folder), folder / "exported")
    written = AutoModelForCausalLM.from_pretrained(folder / "exported").eval()
    assert written.dtype == torch.float64
    tokens = batch_of(2)["tokens"]
    with torch.no_grad():
        difference = written(tokens).logits - model.eval()(tokens).logits
    assert difference.abs().max().item() < TOLERANCE


# Of these the library has no plan, or one with words of its own: layers are cut as it is found.
UNPLANNED = (
    "gpt2", "opt", "bloom", "falcon", "stablelm", "gptj", "gpt_neo", "phi3", "mixtral", "mamba",
    "jamba",
)  # fmt: skip
PLANNED = ("mistral", "qwen2", "gemma", "olmo2", "phi", "cohere", "granite", "starcoder2")


@pytest.mark.parametrize(
    "family",
    [
        "gpt2",
        *(pytest.param(name, marks=pytest.mark.full) for name in (*UNPLANNED[1:], *PLANNED)),
    ],
)
def test_families_without_a_plan_of_the_librarys_are_cut_as_it_is_found(
    family: str, ranks: Callable[[int], Ranks], tmp_path: Path
) -> None:
    changes = NO_DROPOUT if family == "gpt2" else {"dropout": 0.0} if family == "opt" else {}
    model = write_model(tmp_path, family, **changes)
    # The others have two stages as well.
    case = HfCase(str(tmp_path), pp=1 if family == "gpt2" else 2, tp=2)
    losses = reference(model, case)
    expected = dict(model.named_parameters(remove_duplicate=False))
    rounded = family in ("mixtral", "gemma", "phi3", "olmo2", "mamba", "jamba", "gpt_neo")
    tolerance = ROUNDED if rounded else TOLERANCE
    seen, cut = set(), False
    for rank, result in enumerate(ranks(2 * case.pp).run(train_hf, case=case)):
        assert result["losses"] == pytest.approx(losses, abs=tolerance)
        for name, value in result["parameters"].items():
            theirs, shard = library_name(name), result["shards"].get(name)
            seen.add(theirs)
            whole = expected[theirs].detach()
            cut = cut or shard is not None
            whole = whole if shard is None else shard.local(whole, rank % 2)
            # Adam makes much of gradients near 0.
            limit = tolerance if tolerance == TOLERANCE else 50 * tolerance
            assert (value - whole).abs().max().item() < limit, name
    assert cut
    assert seen >= {name for name, _ in model.named_parameters()}


def train_without_sums(case: HfCase) -> str:
    """Shares of outputs are not added up, as if a plan had forgotten it; the refusal."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(sharded_layers, "leave", lambda partial, ranks, whole=False: partial)
        with pytest.raises(ModelError) as refused:
            train_hf(case)
    return str(refused.value)


@pytest.mark.full
def test_a_unit_that_computes_something_else_is_refused_by_layer(
    ranks: Callable[[int], Ranks], tmp_path: Path
) -> None:
    write_model(tmp_path, "gpt2", **NO_DROPOUT)
    for message in ranks(2).run(train_without_sums, case=HfCase(str(tmp_path), pp=1, tp=2)):
        assert message.startswith("tp=2: on the first microbatch the cut module computes other")
        assert "what network." in message
        assert "gives differs" in message
