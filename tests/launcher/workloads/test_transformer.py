"""The published models of transformers are the oracle for the arithmetic of the network."""

import pytest
import torch

from launcher.workloads.language_model import LanguageModel
from launcher.workloads.transformer import Transformer
from launcher.workloads.transformer_shape import TransformerShape

LLAMA = TransformerShape(layers=2, hidden=32, heads=4, kv_heads=2, ffn=48, vocab=61, sequence=24)
GPT = TransformerShape(
    layers=2,
    hidden=32,
    heads=4,
    kv_heads=4,
    ffn=128,
    vocab=61,
    sequence=24,
    norm="layernorm",
    activation="gelu",
    position="learned",
    tie_embeddings=True,
)


def perturbed(shape):
    """A network whose biases and norms are not at their initial, invisible values."""
    network = LanguageModel(shape).double().net.eval()
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in network.parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.add_(0.1 * noise)
    return network


def ids():
    return torch.randint(61, (2, 20), generator=torch.Generator().manual_seed(1))


def test_llama_gives_the_logits_of_transformers():
    from transformers import LlamaConfig, LlamaForCausalLM

    ours = perturbed(LLAMA)
    theirs = LlamaForCausalLM(
        LlamaConfig(
            num_hidden_layers=2,
            hidden_size=32,
            num_attention_heads=4,
            num_key_value_heads=2,
            intermediate_size=48,
            vocab_size=61,
            max_position_embeddings=24,
            rms_norm_eps=1e-5,
            bos_token_id=0,
            eos_token_id=0,
        )
    ).double()
    renamed = {
        "embedding.tokens": "model.embed_tokens",
        "head.projection": "lm_head",
        "head.norm": "model.norm",
        "attention.norm": "input_layernorm",
        "mlp.norm": "post_attention_layernorm",
        "attention.query": "self_attn.q_proj",
        "attention.key": "self_attn.k_proj",
        "attention.value": "self_attn.v_proj",
        "attention.output": "self_attn.o_proj",
        "mlp.gate": "mlp.gate_proj",
        "mlp.up": "mlp.up_proj",
        "mlp.down": "mlp.down_proj",
    }
    state = {}
    for name, value in ours.state_dict().items():
        for old, new in renamed.items():
            if old in name:
                name = name.replace(old, new)
                break
        state[f"model.{name}" if name.startswith("layers") else name] = value
    theirs.load_state_dict(state)
    with torch.no_grad():
        # Their rotary angles are float32 in a float64 model, ours are not: hence not 1e-12.
        torch.testing.assert_close(ours(ids()), theirs(ids()).logits, rtol=1e-5, atol=1e-5)


def test_gpt2_gives_the_logits_of_transformers():
    from transformers import GPT2Config, GPT2LMHeadModel

    ours = perturbed(GPT)
    theirs = GPT2LMHeadModel(
        GPT2Config(
            n_layer=2,
            n_embd=32,
            n_head=4,
            vocab_size=61,
            n_positions=24,
            resid_pdrop=0,
            embd_pdrop=0,
            attn_pdrop=0,
            bos_token_id=0,
            eos_token_id=0,
        )
    ).double()
    get = ours.state_dict().__getitem__
    state = {
        "transformer.wte.weight": get("embedding.tokens.weight"),
        "lm_head.weight": get("embedding.tokens.weight"),
        "transformer.wpe.weight": get("embedding.positions"),
    }
    for leaf in ("weight", "bias"):
        state[f"transformer.ln_f.{leaf}"] = get(f"head.norm.{leaf}")
        for layer in range(2):
            old, new = f"layers.{layer}", f"transformer.h.{layer}"
            qkv = [get(f"{old}.attention.{part}.{leaf}") for part in ("query", "key", "value")]
            parts = (
                {
                    "ln_1": get(f"{old}.attention.norm.{leaf}"),
                    "ln_2": get(f"{old}.mlp.norm.{leaf}"),
                    "attn.c_attn": torch.cat(qkv).T,
                    "attn.c_proj": get(f"{old}.attention.output.{leaf}").T,
                    "mlp.c_fc": get(f"{old}.mlp.up.{leaf}").T,
                    "mlp.c_proj": get(f"{old}.mlp.down.{leaf}").T,
                }
                if leaf == "weight"
                else {
                    "ln_1": get(f"{old}.attention.norm.{leaf}"),
                    "ln_2": get(f"{old}.mlp.norm.{leaf}"),
                    "attn.c_attn": torch.cat(qkv),
                    "attn.c_proj": get(f"{old}.attention.output.{leaf}"),
                    "mlp.c_fc": get(f"{old}.mlp.up.{leaf}"),
                    "mlp.c_proj": get(f"{old}.mlp.down.{leaf}"),
                }
            )
            state |= {f"{new}.{name}.{leaf}": value for name, value in parts.items()}
    theirs.load_state_dict(state)
    with torch.no_grad():
        torch.testing.assert_close(ours(ids()), theirs.eval()(ids()).logits)


@pytest.mark.parametrize("shape", [LLAMA, GPT])
def test_no_position_sees_a_later_token(shape):
    network = perturbed(shape)
    tokens = ids()
    changed = tokens.clone()
    changed[:, 12:] = (changed[:, 12:] + 1) % 61
    with torch.no_grad():
        before, after = network(tokens), network(changed)
    assert torch.equal(before[:, :12], after[:, :12])
    assert not torch.allclose(before[:, 12:], after[:, 12:])


def test_names_do_not_depend_on_the_shapes_options_where_parts_are_the_same():
    names = {name for name, _ in Transformer(LLAMA).named_parameters()}
    assert "layers.1.attention.query.weight" in names
    assert "layers.1.mlp.gate.weight" in names
    assert not any("bias" in name for name in names)
    assert {name.partition(".")[0] for name in names} == {"embedding", "layers", "head"}


def test_the_head_of_a_tied_network_is_the_embedding_itself():
    network = Transformer(GPT)
    assert network.head.projection.weight is network.embedding.tokens.weight
    assert "head.projection.weight" not in dict(network.named_parameters())
