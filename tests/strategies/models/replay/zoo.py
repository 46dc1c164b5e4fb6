"""Small LightningModules as people write them; none knows of pipelines. All run in fp64."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812
from lightning.pytorch import LightningModule
from torch import nn
from torch.utils.checkpoint import checkpoint

ZOO: dict[str, Callable] = {}
DIM = 8


def zoo(build):
    """Registers a function that gives (module, function from seed to batch)."""
    ZOO[build.__name__] = build
    return build


def build(name: str, num_batches: int = 2):
    torch.manual_seed(0)
    module, make_batch = ZOO[name]()
    module = module.double()
    for m in module.modules():  # LayerNorm and biases away from their trivial values
        for p in m.parameters(recurse=False):
            if p.dim() == 1:
                nn.init.normal_(p, 0.5, 0.1)
    batches = []
    for seed in range(num_batches):
        torch.manual_seed(100 + seed)
        batches.append(make_batch())
    return module, batches


def rand(*shape):
    return torch.randn(*shape, dtype=torch.float64)


def classes(*shape, num=5):
    return torch.randint(0, num, shape)


def vectors(batch=4, num=5):
    return lambda: (rand(batch, DIM), classes(batch, num=num))


def tokens(batch=2, length=6, vocab=11):
    return lambda: (classes(batch, length, num=vocab), classes(batch, length, num=vocab))


class Classifier(LightningModule):
    def __init__(self, net):
        super().__init__()
        self.net = net

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, batch_idx):
        x, y = batch
        logits = self(x)
        loss = F.cross_entropy(logits.reshape(-1, logits.shape[-1]), y.reshape(-1))
        self.log("train_loss", loss, prog_bar=True, on_epoch=True)
        self.log("lr", 0.1)
        return loss

    def validation_step(self, batch, batch_idx):
        x, y = batch
        logits = self(x)
        self.log_dict({"val_acc": (logits.argmax(-1) == y).double().mean(), "one": 1})
        return logits

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


@zoo
def mlp():
    layers = [nn.Linear(DIM, 16), nn.ReLU(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 5)]
    return Classifier(nn.Sequential(*layers)), vectors()


@zoo
def mlp_attributes():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc1, self.fc2 = nn.Linear(DIM, 16), nn.Linear(16, 16)
            self.norm, self.head = nn.BatchNorm1d(16), nn.Linear(16, 5)
            self.scale = nn.Parameter(torch.ones(16))

        def forward(self, x):
            x = F.relu(self.fc1(x), inplace=True)
            x = x + self.scale * F.gelu(self.fc2(x))
            return self.head(F.relu(self.norm(x)))

    return Classifier(Net()), vectors()


class Attention(nn.Module):
    def __init__(self, dim, heads=2):
        super().__init__()
        self.heads = heads
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)

    def forward(self, x, mask=None, rotary=None):
        b, t, d = x.shape
        q, k, v = self.qkv(x).view(b, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        if rotary is not None:
            q, k = rotate(q, *rotary), rotate(k, *rotary)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)
        return self.out(y.transpose(1, 2).reshape(b, t, d))


def rotate(x, cos, sin):
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, a * sin + b * cos], -1)


class Block(nn.Module):
    def __init__(self, dim=DIM, dropout=0.0):
        super().__init__()
        self.ln1, self.attn = nn.LayerNorm(dim), Attention(dim)
        self.ln2 = nn.LayerNorm(dim)
        self.mlp = nn.Sequential(
            nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim), nn.Dropout(dropout)
        )

    def forward(self, x, mask=None, rotary=None):
        x = x + self.attn(self.ln1(x), mask, rotary)
        return x + self.mlp(self.ln2(x))


class GPT(nn.Module):
    """As in nanoGPT: a ModuleDict, learned positions, tied embedding and head."""

    def __init__(self, depth=3, dropout=0.0, use_checkpoint=False, vocab=11):
        super().__init__()
        self.use_checkpoint = use_checkpoint
        self.transformer = nn.ModuleDict(
            dict(
                wte=nn.Embedding(vocab, DIM),
                wpe=nn.Embedding(16, DIM),
                drop=nn.Dropout(dropout),
                h=nn.ModuleList([Block(dropout=dropout) for _ in range(depth)]),
                ln_f=nn.LayerNorm(DIM),
            )
        )
        self.lm_head = nn.Linear(DIM, vocab, bias=False)
        self.transformer.wte.weight = self.lm_head.weight

    def forward(self, idx, targets=None):
        pos = torch.arange(0, idx.shape[1], device=idx.device)
        x = self.transformer.drop(self.transformer.wte(idx) + self.transformer.wpe(pos))
        for block in self.transformer.h:
            x = checkpoint(block, x, use_reentrant=False) if self.use_checkpoint else block(x)
        x = self.transformer.ln_f(x)
        if targets is None:
            return self.lm_head(x[:, [-1], :])
        logits = self.lm_head(x)
        return F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1))


class Language(LightningModule):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def training_step(self, batch, batch_idx):
        loss = self.model(*batch)
        self.log("loss", loss)
        return loss


@zoo
def nanogpt_tied():
    return Language(GPT()), tokens()


@zoo
def checkpointed_blocks():
    return Language(GPT(use_checkpoint=True)), tokens()


@zoo
def checkpointed_sublayers():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.ModuleList([nn.Linear(DIM, DIM) for _ in range(4)])
            self.head = nn.Linear(DIM, 5)

        def pair(self, x, a, b):
            return torch.tanh(b(torch.relu(a(x)))) * x

        def forward(self, x):
            x = x + checkpoint(self.pair, x, self.fc[0], self.fc[1], use_reentrant=False)
            x = x + checkpoint(self.pair, x, self.fc[2], self.fc[3], use_reentrant=False)
            return self.head(x)

    return Classifier(Net()), vectors()


class HuggingFace(LightningModule):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def training_step(self, batch, batch_idx):
        output = self.model(**batch)
        self.log("loss", output.loss)
        return output.loss


def token_batch(vocab=32, length=7, labels=True):
    def make():
        ids = classes(2, length, num=vocab)
        mask = torch.ones_like(ids)
        mask[1, -2:] = 0
        return {"input_ids": ids, "attention_mask": mask, "labels": ids.clone()}

    return make


WIDTHS = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2}
ATTENTION = {"num_key_value_heads": 1, "max_position_embeddings": 32}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
NO_GPT2_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
# Name -> (configuration, model, sizes) of the transformers library.
HUGGING_FACE = {
    "hf_llama": (
        "LlamaConfig", "LlamaForCausalLM", {**WIDTHS, **ATTENTION, "num_hidden_layers": 3},
    ),
    "hf_gpt2": (
        "GPT2Config", "GPT2LMHeadModel",
        {"n_embd": 16, "n_layer": 3, "n_head": 2, "n_positions": 32, **NO_GPT2_DROPOUT,
         "bos_token_id": 0, "eos_token_id": 0},
    ),
    "hf_bert": (
        "BertConfig", "BertForMaskedLM",
        {**WIDTHS, **NO_DROPOUT, "num_hidden_layers": 3, "max_position_embeddings": 32},
    ),
    "hf_t5": (
        "T5Config", "T5ForConditionalGeneration",
        {"d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 2, "num_heads": 2,
         "dropout_rate": 0.0, "decoder_start_token_id": 0},
    ),
    "hf_mixtral": (
        "MixtralConfig", "MixtralForCausalLM",
        {**WIDTHS, **ATTENTION, "num_hidden_layers": 2, "num_local_experts": 2,
         "num_experts_per_tok": 1, "experts_implementation": "eager"},
    ),
}  # fmt: skip


def hugging_face(name):
    import transformers

    config, model, sizes = HUGGING_FACE[name]
    made = getattr(transformers, config)(vocab_size=32, **sizes)
    return HuggingFace(getattr(transformers, model)(made)), token_batch()


ZOO |= {name: functools.partial(hugging_face, name) for name in HUGGING_FACE}


@zoo
def hf_gpt2_checkpointed():
    module, batch = hugging_face("hf_gpt2")
    # transformers 5.17 has the old name only, later ones warn of it.
    older = module.model.gradient_checkpointing_enable
    getattr(module.model, "activation_checkpointing_enable", older)({"use_reentrant": False})
    module.model.train()
    return module, batch


class BasicBlock(nn.Module):
    def __init__(self, inp, out, stride=1):
        super().__init__()
        self.conv1 = nn.Conv2d(inp, out, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(out)
        self.conv2 = nn.Conv2d(out, out, 3, 1, 1, bias=False)
        self.bn2, self.relu = nn.BatchNorm2d(out), nn.ReLU(inplace=True)
        self.down = None
        if stride != 1 or inp != out:
            self.down = nn.Sequential(nn.Conv2d(inp, out, 1, stride), nn.BatchNorm2d(out))

    def forward(self, x):
        y = self.relu(self.bn1(self.conv1(x)))
        y = self.bn2(self.conv2(y))
        return self.relu(y + (x if self.down is None else self.down(x)))


def images(batch=2, channels=3, size=8):
    return lambda: (rand(batch, channels, size, size), classes(batch))


@zoo
def resnet():
    class ResNet(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv1, self.bn1 = nn.Conv2d(3, 4, 3, 1, 1, bias=False), nn.BatchNorm2d(4)
            self.layer1 = nn.Sequential(BasicBlock(4, 4), BasicBlock(4, 4))
            self.layer2 = nn.Sequential(BasicBlock(4, 6, 2), BasicBlock(6, 6))
            self.fc = nn.Linear(6, 5)

        def forward(self, x):
            x = F.relu(self.bn1(self.conv1(x)), inplace=True)
            x = self.layer2(self.layer1(x))
            return self.fc(torch.flatten(F.adaptive_avg_pool2d(x, 1), 1))

    return Classifier(ResNet()), images()


@zoo
def channels_last_cnn():
    net = nn.Sequential(
        nn.Conv2d(3, 4, 3, 1, 1),
        nn.ReLU(inplace=True),
        nn.Conv2d(4, 4, 3, 1, 1),
        nn.GroupNorm(2, 4),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(16, 5),
    )

    def batch():
        return rand(2, 3, 8, 8).to(memory_format=torch.channels_last), classes(2)

    return Classifier(net.to(memory_format=torch.channels_last)), batch


class DoubleConv(nn.Module):
    def __init__(self, inp, out):
        super().__init__()
        self.seq = nn.Sequential(
            nn.Conv2d(inp, out, 3, 1, 1),
            nn.GroupNorm(1, out),
            nn.ReLU(inplace=True),
            nn.Conv2d(out, out, 3, 1, 1),
            nn.ReLU(inplace=True),
        )

    def forward(self, x):
        return self.seq(x)


@zoo
def unet():
    class UNet(nn.Module):
        def __init__(self):
            super().__init__()
            self.down1, self.down2, self.mid = DoubleConv(3, 4), DoubleConv(4, 6), DoubleConv(6, 8)
            self.up2, self.up1 = DoubleConv(14, 6), DoubleConv(10, 4)
            self.out = nn.Conv2d(4, 5, 1)

        def forward(self, x):
            a = self.down1(x)
            b = self.down2(F.max_pool2d(a, 2))
            m = self.mid(F.max_pool2d(b, 2))
            u = self.up2(torch.cat([F.interpolate(m, scale_factor=2), b], 1))
            u = self.up1(torch.cat([F.interpolate(u, scale_factor=2), a], 1))
            return self.out(u).permute(0, 2, 3, 1)

    return Classifier(UNet()), lambda: (rand(2, 3, 8, 8), classes(2, 8, 8))


@zoo
def diffusion():
    """Noise and timesteps are drawn from the batch alone, the same on all stages."""

    class Diffusion(LightningModule):
        def __init__(self):
            super().__init__()
            self.time = nn.Embedding(10, DIM)
            self.inp = nn.Linear(DIM, DIM)
            self.blocks = nn.ModuleList([nn.Linear(DIM, DIM) for _ in range(4)])
            self.register_buffer("alphas", torch.linspace(0.1, 0.9, 10))

        def training_step(self, batch, batch_idx):
            x, noise, t = batch
            alpha = self.alphas[t][:, None]
            noisy = alpha * x + (1 - alpha) * noise
            h, emb = self.inp(noisy), self.time(t)
            skips = []
            for block in self.blocks[:2]:
                h = torch.tanh(block(h + emb))
                skips.append(h)
            for block in self.blocks[2:]:
                h = torch.tanh(block(h + emb)) + skips.pop()
            loss = F.mse_loss(h, noise, reduction="none").mean()
            self.log_dict({"mse": loss, "alpha": alpha.mean()}, on_step=True)
            return {"loss": loss, "pred": h}

    def batch():
        return rand(4, DIM), rand(4, DIM), torch.randint(0, 10, (4,))

    return Diffusion(), batch


class Expert(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(DIM, 12), nn.Linear(12, DIM)

    def forward(self, x):
        return self.down(F.silu(self.up(x)))


class MoEBlock(nn.Module):
    """Token choice, with loops over the tokens of each expert: looks at its data."""

    def __init__(self, keep=False):
        super().__init__()
        self.keep = keep
        self.gate = nn.Linear(DIM, 3)
        self.experts = nn.ModuleList([Expert() for _ in range(3)])

    def forward(self, x):
        probs = self.gate(x).softmax(-1)
        weight, choice = probs.max(-1)
        y = torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            rows = (choice == index).nonzero(as_tuple=True)[0]
            if len(rows):
                y = y.index_add(0, rows, expert(x[rows]) * weight[rows, None])
        aux = 3 * (probs.mean(0) ** 2).sum()
        if self.keep:
            self.aux_loss = aux
            return x + y
        return x + y, aux


@zoo
def moe_aux_returned():
    class MoE(LightningModule):
        def __init__(self):
            super().__init__()
            self.inp = nn.Linear(DIM, DIM)
            self.blocks = nn.ModuleList([MoEBlock() for _ in range(3)])
            self.head = nn.Linear(DIM, 5)

        def training_step(self, batch, batch_idx):
            x, y = batch
            x, total = self.inp(x), 0.0
            for number, block in enumerate(self.blocks):
                x, aux = block(x)
                total = total + aux
                self.log(f"aux_{number}", aux)
            loss = F.cross_entropy(self.head(x), y) + 0.01 * total
            self.log("loss", loss)
            return loss

    return MoE(), vectors(6)


@zoo
def moe_aux_on_attribute():
    class MoE(LightningModule):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList([MoEBlock(keep=True) for _ in range(3)])
            self.head = nn.Linear(DIM, 5)

        def training_step(self, batch, batch_idx):
            x, y = batch
            for block in self.blocks:
                x = block(x)
            aux = sum(block.aux_loss for block in self.blocks)
            loss = F.cross_entropy(self.head(x), y) + 0.01 * aux
            self.log("aux", aux)
            return loss

    return MoE(), vectors(6)


@zoo
def side_inputs_mask_rotary():
    class Net(LightningModule):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(11, DIM)
            self.layers = nn.ModuleList([Block() for _ in range(3)])
            self.head = nn.Linear(DIM, 11)
            self.register_buffer("inv_freq", 1.0 / 10 ** (torch.arange(2) / 2))

        def training_step(self, batch):
            ids, lengths = batch["ids"], batch["lengths"]
            t = ids.shape[1]
            positions = torch.arange(t, device=ids.device)
            angle = positions[:, None] * self.inv_freq
            x = self.embed(ids)
            rotary = (angle.cos().to(x.dtype), angle.sin().to(x.dtype))
            mask = (positions[None] < lengths[:, None])[:, None, None, :]
            mask = mask & torch.ones(t, t, dtype=torch.bool, device=x.device).tril()
            for layer in self.layers:
                x = layer(x, mask=mask, rotary=rotary)
            logits = self.head(x)
            keep = (positions[None] < lengths[:, None])[:, :-1]
            loss = F.cross_entropy(logits[:, :-1][keep], ids[:, 1:][keep])
            self.log("loss", loss, batch_size=ids.shape[0])
            self.log("padding", 1 - keep.double().mean())
            return loss

    def batch():
        return {"ids": classes(2, 6, num=11), "lengths": torch.tensor([6, 4])}

    return Net(), batch


@zoo
def two_towers():
    class Tower(nn.Module):
        def __init__(self):
            super().__init__()
            self.inp = nn.Linear(DIM, DIM)
            self.blocks = nn.ModuleList([Expert() for _ in range(2)])

        def forward(self, x):
            x = self.inp(x)
            for block in self.blocks:
                x = x + block(x)
            return F.normalize(x, dim=-1)

    class CLIP(LightningModule):
        def __init__(self):
            super().__init__()
            self.image, self.text = Tower(), Tower()
            self.logit_scale = nn.Parameter(torch.tensor(math.log(10.0)))

        def training_step(self, batch, batch_idx):
            image, text = self.image(batch["image"]), self.text(batch["text"])
            logits = self.logit_scale.exp() * image @ text.t()
            labels = torch.arange(len(logits), device=logits.device)
            loss = (F.cross_entropy(logits, labels) + F.cross_entropy(logits.t(), labels)) / 2
            self.log("scale", self.logit_scale.exp())
            return loss

    return CLIP(), lambda: {"image": rand(4, DIM), "text": rand(4, DIM)}


@zoo
def siamese_shared_encoder():
    class Siamese(LightningModule):
        def __init__(self):
            super().__init__()
            self.encoder = nn.Sequential(nn.Linear(DIM, DIM), nn.Tanh(), nn.Linear(DIM, DIM))

        def training_step(self, batch, batch_idx):
            a, b = self.encoder(batch[0]), self.encoder(batch[1])
            loss = 1 - F.cosine_similarity(a, b).mean()
            self.log("loss", loss)
            return loss

    return Siamese(), lambda: [rand(4, DIM), rand(4, DIM)]


@zoo
def lstm():
    class Tagger(LightningModule):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(11, DIM)
            self.lstm = nn.LSTM(DIM, DIM, num_layers=2, batch_first=True)
            self.gru = nn.GRU(DIM, DIM, batch_first=True)
            self.head = nn.Linear(DIM, 11)

        def training_step(self, batch, batch_idx):
            x, (h, c) = self.lstm(self.embed(batch[0]))
            y, _ = self.gru(x, h[-1:].contiguous())
            loss = F.cross_entropy(self.head(y).flatten(0, 1), batch[1].flatten())
            self.log("loss", loss + 0 * c.sum())
            return loss

    return Tagger(), tokens()


@zoo
def recurrent_cell():
    class Cell(LightningModule):
        def __init__(self):
            super().__init__()
            self.cell, self.head = nn.GRUCell(DIM, DIM), nn.Linear(DIM, 5)

        def training_step(self, batch, batch_idx):
            x, y = batch
            h = x.new_zeros(x.shape[0], DIM)
            for t in range(x.shape[1]):
                h = self.cell(x[:, t], h)
            loss = F.cross_entropy(self.head(h), y)
            self.log("loss", loss)
            return loss

    return Cell(), lambda: (rand(3, 4, DIM), classes(3))


@zoo
def vit():
    class ViT(nn.Module):
        def __init__(self):
            super().__init__()
            self.patch = nn.Conv2d(3, DIM, 4, 4)
            self.cls_token = nn.Parameter(torch.randn(1, 1, DIM))
            self.pos_embed = nn.Parameter(torch.randn(1, 5, DIM))
            layer = nn.TransformerEncoderLayer(
                DIM, 2, 16, dropout=0.0, batch_first=True, norm_first=True
            )
            self.encoder = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
            self.norm, self.head = nn.LayerNorm(DIM), nn.Linear(DIM, 5)

        def forward(self, x):
            x = self.patch(x).flatten(2).transpose(1, 2)
            x = torch.cat([self.cls_token.expand(x.shape[0], -1, -1), x], dim=1) + self.pos_embed
            return self.head(self.norm(self.encoder(x))[:, 0])

    return Classifier(ViT()), images()


@zoo
def frozen_backbone():
    class Frozen(LightningModule):
        def __init__(self):
            super().__init__()
            self.backbone = nn.Sequential(*[nn.Linear(DIM, DIM) for _ in range(3)])
            self.backbone.requires_grad_(False)
            self.head = nn.Sequential(nn.Linear(DIM, DIM), nn.ReLU(), nn.Linear(DIM, 5))

        def training_step(self, batch, batch_idx):
            with torch.no_grad():
                features = self.backbone(batch[0])
            loss = F.cross_entropy(self.head(features), batch[1])
            self.log("norm", features.norm())
            return loss

    return Frozen(), vectors()


@zoo
def distillation():
    class Distill(LightningModule):
        def __init__(self):
            super().__init__()
            self.teacher = nn.Sequential(nn.Linear(DIM, DIM), nn.ReLU(), nn.Linear(DIM, 5))
            self.student = nn.Sequential(nn.Linear(DIM, DIM), nn.ReLU(), nn.Linear(DIM, 5))
            self.teacher.requires_grad_(False)

        def training_step(self, batch, batch_idx):
            with torch.no_grad():
                target = self.teacher(batch[0]).softmax(-1)
            logits = self.student(batch[0])
            kl = F.kl_div(logits.log_softmax(-1), target, reduction="batchmean")
            loss = kl + F.cross_entropy(logits, batch[1])
            self.log_dict({"kl": kl, "loss": loss})
            return loss

    return Distill(), vectors()


@zoo
def early_return_and_item():
    class Early(LightningModule):
        def __init__(self):
            super().__init__()
            self.fc1, self.fc2, self.head = (nn.Linear(DIM, DIM) for _ in range(3))
            self.history: list[float] = []

        def training_step(self, batch, batch_idx):
            x, y = batch
            if x.shape[0] == 0:
                return None
            logits = self.head(torch.tanh(self.fc2(torch.tanh(self.fc1(x)))))
            loss = F.cross_entropy(logits, y.clamp(max=DIM - 1))
            if not torch.isfinite(loss):
                return None
            self.history.append(loss.item())
            self.log("loss", loss.item())
            return loss

    return Early(), vectors()


@zoo
def torchmetrics_accuracy():
    from torchmetrics.classification import MulticlassAccuracy

    class Metrics(LightningModule):
        def __init__(self):
            super().__init__()
            self.net = nn.Sequential(*[nn.Linear(DIM, DIM) for _ in range(3)], nn.Linear(DIM, 5))
            self.accuracy = MulticlassAccuracy(num_classes=5)

        def training_step(self, batch, batch_idx):
            logits = self.net(batch[0])
            self.accuracy(logits.softmax(-1), batch[1])
            self.log("accuracy", self.accuracy, on_epoch=True)
            return F.cross_entropy(logits, batch[1])

    return Metrics(), vectors()


@zoo
def weight_penalty():
    """An L2 term over all weights: the last stage needs copies of them."""

    class Penalty(LightningModule):
        def __init__(self):
            super().__init__()
            self.net = nn.Sequential(nn.Linear(DIM, DIM), nn.Tanh(), nn.Linear(DIM, 5))

        def training_step(self, batch, batch_idx):
            loss = F.cross_entropy(self.net(batch[0]), batch[1])
            penalty = sum((p**2).sum() for p in self.net.parameters())
            self.log("penalty", penalty)
            return loss + 0.1 * penalty

    return Penalty(), vectors()


@zoo
def weight_penalty_first():
    """The same before the first layer, over all parameters the module lists."""

    class Penalty(LightningModule):
        def __init__(self):
            super().__init__()
            self.net = nn.Sequential(nn.Linear(DIM, DIM), nn.Tanh(), nn.Linear(DIM, 5))

        def training_step(self, batch, batch_idx):
            penalty = sum((p**2).sum() for p in self.parameters())
            self.log("penalty", penalty)
            return F.cross_entropy(self.net(batch[0]), batch[1]) + 0.1 * penalty

    return Penalty(), vectors()


@zoo
def state_between_steps():
    """A running mean kept by the step, an attribute kept by a layer, a loop over batch data."""

    class Stateful(LightningModule):
        def __init__(self):
            super().__init__()
            self.net = nn.Sequential(*[nn.Linear(DIM, DIM) for _ in range(4)])
            self.running = torch.zeros(())
            self.register_buffer("center", torch.zeros(DIM))

        def training_step(self, batch, batch_idx):
            x, y = batch
            for _ in range(int(y[0])):  # as many operations as the batch says
                x = x * 0.9 + y.sum()
            logits = self.net(x)
            loss = F.cross_entropy(logits - self.center, y)
            self.running = 0.9 * self.running + 0.1 * loss.detach()
            self.center.mul_(0.9).add_(logits.detach().mean(0))
            self.log("running", self.running)
            return loss

    return Stateful(), vectors()


@zoo
def custom_autograd_function():
    """A straight-through estimator between layers, another inside a layer."""

    class Round(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return torch.round(x * 4) / 4

        @staticmethod
        def backward(ctx, grad):
            return grad

    class Quantised(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)

        def forward(self, x):
            return self.b(Round.apply(self.a(x)))

    class Net(LightningModule):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList([Quantised() for _ in range(3)])

        def training_step(self, batch, batch_idx):
            x = batch[0]
            for block in self.blocks:
                x = Round.apply(torch.tanh(block(x)))
            return F.cross_entropy(x, batch[1])

    return Net(), vectors()


@zoo
def deep_supervision():
    """Heads after every block; losses far from where they are summed up."""

    class Deep(LightningModule):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList([Expert() for _ in range(3)])
            self.heads = nn.ModuleList([nn.Linear(DIM, 5) for _ in range(3)])

        def training_step(self, batch, batch_idx):
            x, losses = batch[0], {}
            for i, (block, head) in enumerate(zip(self.blocks, self.heads, strict=True)):
                x = block(x)
                losses[f"loss_{i}"] = F.cross_entropy(head(x), batch[1])
            self.log_dict(losses)
            return torch.stack(list(losses.values())).mean()

    return Deep(), vectors()


@zoo
def dataclass_outputs():
    @dataclass
    class Output:
        hidden: torch.Tensor
        gate: torch.Tensor
        name: str = "block"

    class Gated(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc, self.gate = nn.Linear(DIM, DIM), nn.Linear(DIM, 1)

        def forward(self, x):
            return Output(hidden=torch.tanh(self.fc(x)), gate=self.gate(x).sigmoid())

    class Net(LightningModule):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList([Gated() for _ in range(3)])
            self.head = nn.Linear(DIM, 5)

        def training_step(self, batch, batch_idx):
            x, gates = batch[0], []
            for block in self.blocks:
                out = block(x)
                x = out.gate * out.hidden + x
                gates.append(out.gate)
            self.log("gate", torch.cat(gates, 1).mean())
            return F.cross_entropy(self.head(x), batch[1])

    return Net(), vectors()


@zoo
def preallocated_and_in_place():
    """Writes into tensors that it makes itself, between the layers."""

    class Net(LightningModule):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(DIM, DIM) for _ in range(4)])

        def training_step(self, batch, batch_idx):
            x, y = batch
            states = torch.zeros(x.shape[0], 4, DIM, dtype=x.dtype, device=x.device)
            for i, layer in enumerate(self.layers):
                x = layer(x)
                x += 1
                x = torch.tanh_(x)
                states[:, i] = x
            x = x.clone()
            x *= 2
            loss = F.cross_entropy(states.mean(1) + x, y)
            self.log("loss", loss)
            return loss

    return Net(), vectors()


@zoo
def writes_into_batch():
    class Net(LightningModule):
        def __init__(self):
            super().__init__()
            self.net = nn.Sequential(*[nn.Linear(DIM, DIM) for _ in range(3)])

        def training_step(self, batch, batch_idx):
            batch["x"] -= batch["x"].mean(0)
            loss = F.cross_entropy(self.net(batch["x"]), batch["y"])
            batch["loss"] = loss
            self.log("loss", batch["loss"])
            return loss

    return Net(), lambda: {"x": rand(4, DIM), "y": classes(4)}


@zoo
def forward_hooks():
    """Features collected by hooks, as people do for perceptual losses."""

    class Net(LightningModule):
        def __init__(self):
            super().__init__()
            self.layers = nn.Sequential(*[nn.Linear(DIM, DIM) for _ in range(4)])
            self.features: dict[str, torch.Tensor] = {}
            for name, layer in self.layers.named_children():
                layer.register_forward_hook(
                    lambda m, args, out, name=name: self.features.update({name: out})
                )

        def training_step(self, batch, batch_idx):
            logits = self.layers(batch[0])
            style = sum(f.pow(2).mean() for f in self.features.values())
            self.log("style", style)
            return F.cross_entropy(logits, batch[1]) + 0.1 * style

    return Net(), vectors()


@zoo
def spectral_and_weight_norm():
    from torch.nn.utils.parametrizations import weight_norm

    class Net(LightningModule):
        def __init__(self):
            super().__init__()
            self.a = weight_norm(nn.Linear(DIM, DIM))
            self.b, self.c = weight_norm(nn.Linear(DIM, DIM)), nn.Linear(DIM, 5)

        def training_step(self, batch, batch_idx):
            loss = F.cross_entropy(self.c(self.b(self.a(batch[0]).relu()).relu()), batch[1])
            self.log("loss", loss)
            return loss

    return Net(), vectors()


@zoo
def layouts_that_are_not_contiguous():
    """Every layer hands a transposed tensor on; ``view`` works on its own layout only."""

    class Transposing(nn.Linear):
        def forward(self, x):
            return super().forward(x).transpose(1, 2)

    class Net(LightningModule):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList([Transposing(DIM, DIM) for _ in range(4)])

        def training_step(self, batch, batch_idx):
            x, y = batch
            for layer in self.layers:
                x = layer(x)
                x = x.transpose(1, 2).view(x.shape[0] * x.shape[2], -1).relu().view(*batch[0].shape)
            return F.cross_entropy(x[:, 0], y)

    return Net(), lambda: (rand(2, 3, DIM), classes(2))


@zoo
def conversions_and_devices():
    """Moves that do nothing on one device, conversions, and tensors made like others."""

    class Net(LightningModule):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(DIM, DIM) for _ in range(4)])

        def training_step(self, batch, batch_idx):
            x, y = batch
            for i, layer in enumerate(self.layers):
                x = layer(x.to(self.device)).to("cpu", non_blocking=True).cpu().type_as(batch[0])
                keep = torch.ones_like(x).cumsum(-1) <= DIM - i
                x = x.float().double().masked_fill(~keep, 0.0) + torch.full_like(x, 0.1)
                position = torch.arange(x.shape[0], device=x.device, dtype=x.dtype)
                x = x + position[:, None] + x.new_tensor([1.0])
                rows = batch[0][:, 0] > 0
                top = x.topk(2, dim=-1).values.sum() + x[rows].sum()
                x = x * torch.sigmoid(top)
                x[rows] = 0.5
                mixed = torch.zeros(x.shape[0], DIM, dtype=x.dtype)
                mixed[rows] = layer(batch[0])[rows]
                x = x + mixed
            return F.cross_entropy(x, y)

    return Net(), vectors()


@zoo
def densenet():
    class Dense(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(DIM + 4 * i, 4) for i in range(4)])
            self.head = nn.Linear(DIM + 16, 5)

        def forward(self, x):
            features = [x]
            for layer in self.layers:
                features.append(torch.relu(layer(torch.cat(features, 1))))
            return self.head(torch.cat(features, 1))

    return Classifier(Dense()), vectors()
