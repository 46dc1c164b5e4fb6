"""python examples/llama_lora.py FOLDER: LoRA on a Hugging Face model of a local folder.

FOLDER has config.json and weights (without one: a small random Llama). Needs transformers and peft.
"""

import sys
from pathlib import Path

import lightning.pytorch as pl
import torch
from peft import LoraConfig, get_peft_model
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, LlamaConfig

from strategies import PipelineStrategy

LENGTH = 32
SMALL = LlamaConfig(
    vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=4,
    num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=LENGTH,
)  # fmt: skip


class Tuned(pl.LightningModule):
    def __init__(self, folder=None):
        super().__init__()
        torch.manual_seed(0)
        whole = (
            AutoModelForCausalLM.from_pretrained(folder)
            if folder
            else AutoModelForCausalLM.from_config(SMALL)
        )
        lora = LoraConfig(r=8, lora_alpha=16, target_modules=["q_proj", "v_proj"])
        self.model = get_peft_model(whole, lora)  # freezes all but the adapters

    def training_step(self, batch, batch_idx):
        loss = self.model(input_ids=batch, labels=batch).loss
        self.log("loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self):
        learned = [p for p in self.parameters() if p.requires_grad]
        return torch.optim.AdamW(learned, lr=1e-2)


folder = sys.argv[1] if len(sys.argv) > 1 else None
text = Path(pl.__file__).with_name("trainer").joinpath("trainer.py").read_bytes()
data = torch.tensor(list(text[: 256 * LENGTH])).view(-1, LENGTH)  # bytes as tokens
strategy = PipelineStrategy(pp=2, schedule="1f1b", num_microbatches=4)
trainer = pl.Trainer(strategy=strategy, accelerator="cpu", max_epochs=2)
trainer.fit(Tuned(folder), DataLoader(data, batch_size=16))
