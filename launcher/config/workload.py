"""Keys of what is trained: model, data, optimizer, and text generation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from launcher.config.key import Args, key


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """``model=``: the shape of a decoder-only transformer."""

    name: str = key(
        "tiny",
        "Label of a transformer of the sizes below; hf; class: a LightningModule of your own; or a "
        "model of an installed package.",
    )
    layers: int = key(6, "Transformer blocks.", low=1, high=100_000)
    hidden: int = key(128, "Width of the residual stream.", low=1)
    heads: int = key(4, "Attention heads; must divide hidden.", low=1)
    kv_heads: int | None = key(
        None, "Key/value heads; must divide heads; null = heads.", low=1, example=2
    )
    ffn: int | None = key(None, "Inner width of the MLP; null = 4 * hidden.", low=1, example=256)
    vocab: int | None = key(
        None, "Vocabulary size; null = that of the data's tokenizer.", low=2, example=256
    )
    sequence: int = key(128, "Tokens per sequence.", low=2)
    norm: Literal["layernorm", "rmsnorm"] = key("rmsnorm", "Normalisation before each half-block.")
    activation: Literal["gelu", "swiglu"] = key("swiglu", "MLP; swiglu has three weight matrices.")
    position: Literal["learned", "rope"] = key("rope", "How positions enter the model.")
    tie_embeddings: bool = key(False, "Whether input embedding and output head share one weight.")
    dropout: float = key(0.0, "Dropout probability.", low=0, high=0.999)
    experts: int | None = key(
        None, "Experts per layer in the place of its MLP; null = none.", low=1, example=8
    )
    experts_per_token: int | None = key(
        None, "Experts that each token goes to; null = 2.", low=1, example=2
    )
    expert_ffn: int | None = key(None, "Inner width of one expert; null = ffn.", low=1, example=256)
    shared_experts: int = key(
        0, "Experts that every token goes to, beside those of its router.", low=0, high=1024
    )
    first_dense_layers: int = key(
        0, "Layers at the beginning that keep their MLP.", low=0, high=100_000
    )
    expert_every: int = key(
        1, "One layer of so many has experts: the last of each group.", low=1, high=100_000
    )
    router: Literal["softmax", "sigmoid"] = key(
        "softmax", "How a router scores experts, in 32 bits: against each other, or each by itself."
    )
    router_normalized: bool = key(
        True, "Whether the weights of a token's experts are made to sum to 1."
    )
    router_scale: float = key(1.0, "Factor of the weights of a token's experts.", above=0)
    aux_loss: float | None = key(
        None, "Factor of each layer's balance loss; null = 0.01.", low=0, example=0.01
    )
    aux_loss_over: Literal["sequence", "microbatch"] = key(
        "sequence",
        "What the balance loss is taken over; sequence: the same loss however a batch is cut.",
    )
    expert_imbalance: float = key(
        1.0,
        "For predictions with ep > 1: tokens of the rank that gets most, over the mean.",
        low=1,
        high=1000,
        example=1.2,
    )
    z_loss: float = key(0.0, "Factor of each layer's loss on the size of router logits.", low=0)
    bias_update_rate: float = key(
        0.0,
        "Step of a bias that steers tokens to experts that got few, without a loss; 0 = no bias.",
        low=0,
        high=1,
    )
    path: str | None = key(
        None,
        "hf: folder with config.json and *.safetensors; class: where your class is, "
        "my_pkg.nets:LitNet or nets.py:LitNet.",
        example="/models/my_llama",
    )
    args: Args = key(
        Args(),
        "class, and models of packages: arguments of its constructor, model.args.width=64; checked "
        "against its signature.",
        example={"width": 64},
    )
    pretrained: bool = key(
        True, "hf: whether the weights are the folder's; false = fresh ones for its config.json."
    )
    layers_path: str | None = key(
        None,
        "hf: name of the list of decoder layers, for an architecture where it is not found.",
        example="model.layers",
    )


@dataclass(frozen=True, slots=True)
class DataConfig:
    """``data=``: where tokens come from and how they are batched."""

    name: str = key(
        "stdlib",
        "stdlib: the Python standard library's sources; text: a text file or folder; tokens: a "
        "flat file of token ids; class: a LightningDataModule of your own; or a data module of an "
        "installed package.",
    )
    path: str | None = key(
        None,
        "File or folder for text and tokens; class: where your class is, my_pkg.data:Images.",
        example="/data/corpus.txt",
    )
    args: Args = key(
        Args(),
        "class, and data of packages: arguments of its constructor, data.args.folder=/data.",
        example={"folder": "/data"},
    )
    tokenizer: str | None = key(
        None, "A tokenizer.json for stdlib and text; null = bytes.", example="/data/tokenizer.json"
    )
    dtype: Literal["uint16", "uint32"] = key("uint16", "tokens: type of one id, little endian.")
    val_fraction: float = key(0.1, "Share of the tokens kept for validation.", above=0, high=0.9)
    max_bytes: int | None = key(
        None, "Bytes of the source that are read; null = all.", low=1024, example=2_000_000
    )
    global_batch_size: int | None = key(
        None,
        "Sequences per optimizer step over all replicas; null = num_microbatches * "
        "microbatch_size * dp.",
        low=1,
        example=16,
    )
    microbatch_size: int = key(1, "Sequences per microbatch.", low=1)
    num_workers: int = key(0, "DataLoader worker processes per rank.", low=0, high=1024)


@dataclass(frozen=True, slots=True)
class OptimizerConfig:
    """``optimizer=``: update rule and learning rate."""

    name: Literal["adamw", "adam", "muon", "sgd", "class"] = key(
        "adamw",
        "Update rule; muon: Muon for matrices, AdamW for embeddings, head, norms and biases; "
        "class: an optimizer of your own or of any library.",
    )
    path: str | None = key(
        None, "class: where it is, torch.optim:RAdam.", example="torch.optim:RAdam"
    )
    args: Args = key(
        Args(), "class: arguments of its constructor beside lr.", example={"weight_decay": 0.1}
    )
    lr: float = key(1e-3, "Peak learning rate.", above=0)
    weight_decay: float = key(0.1, "Weight decay; adamw decouples it from the gradient.", low=0)
    betas: tuple[float, float] | None = key(
        None,
        "adamw, adam, and what muon leaves to AdamW: the two averaging factors; null = [0.9,0.95].",
        example=[0.9, 0.95],
    )
    eps: float | None = key(
        None,
        "adamw, adam, and what muon leaves to AdamW: term in the denominator; null = 1e-8.",
        above=0,
        example=1e-8,
    )
    momentum: float | None = key(
        None,
        "sgd and muon: momentum; null = none for sgd, 0.95 for muon.",
        low=0,
        high=0.9999,
        example=0.9,
    )
    nesterov: bool | None = key(
        None, "muon: look ahead by the momentum; null = true.", example=False
    )
    ns_steps: int = key(5, "muon: Newton-Schulz steps of an update.", low=1, high=99)
    adjust_lr: Literal["match_rms_adamw", "original"] = key(
        "match_rms_adamw",
        "muon: how lr follows a matrix's sizes; match_rms_adamw: updates as large as AdamW's; "
        "original: times sqrt(rows / columns) where that is above 1.",
    )
    adamw_lr: float | None = key(
        None, "muon: peak learning rate of what AdamW updates; null = lr.", above=0, example=3e-4
    )
    warmup_steps: int = key(10, "Steps of linear warm-up from 0 to lr.", low=0)
    min_lr_ratio: float = key(0.1, "cosine: final learning rate over lr.", low=0, high=1)
    schedule: Literal["cosine", "constant"] = key("cosine", "Learning rate after the warm-up.")

    @property
    def muon_steps(self) -> int:
        """Newton-Schulz steps of an update; 0 of any other optimizer."""
        return self.ns_steps if self.name == "muon" else 0


@dataclass(frozen=True, slots=True)
class ExportConfig:
    """``export.*``: what ``mode=export`` writes."""

    path: str | None = key(
        None,
        "What is written, new; null = export (a folder), export.safetensors or export.ckpt in the "
        "run's folder.",
        example="/models/mine",
    )
    format: Literal["huggingface", "safetensors", "ckpt"] | None = key(
        None,
        "huggingface: a folder for transformers, of the built-in transformer and model=hf; "
        "safetensors: one file with the weights of any model; ckpt: one file of stock Lightning; "
        "null = by the end of export.path, else huggingface where that can be, else safetensors.",
        example="safetensors",
    )


@dataclass(frozen=True, slots=True)
class GenerateConfig:
    """``generate.*``: what ``mode=generate`` writes."""

    prompt: str = key("def ", "Text that is continued.", example="Hello")
    max_new_tokens: int = key(64, "Tokens to add.", low=1, high=1_000_000)
    temperature: float = key(0.8, "0 takes the most probable token.", low=0, high=100)
    top_k: int | None = key(
        None, "Draw among the k most probable tokens; null = all.", low=1, example=50
    )
