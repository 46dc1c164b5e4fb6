"""What people type who come from elsewhere, and what that is here: keys, options, values.

Lightning, Hugging Face, accelerate, Megatron, DeepSpeed, torchtitan, torchrun and SLURM call the
same things by other names, and numbers come with units. Nothing here is accepted; it is what a
refusal suggests. Names are looked up in lower case, with underscores.
"""

from __future__ import annotations

import math
import re

_PROCESSES = "pp=, dp= and tp=, whose product is the number of processes"
_SBATCH = "\"cluster.extra=['--{name}=VALUE']\", which goes to sbatch as it is"
_TORCHRUN = "cluster=torchrun: where processes meet is said to torchrun itself"
_OWN_CLASS = "model=class model.path=my_pkg.nets:LitNet"
_STOPPING = (
    "callbacks.stop.path=lightning.pytorch.callbacks:EarlyStopping "
    "callbacks.stop.args.monitor=val_loss"
)
MEANT_KEYS = {
    # Whole paths first: their last names mean something else elsewhere.
    "data.file data.files data.train data.train_file data.url data.dir data.folder data.root "
    "data.dataset":
        "data=text data.path=/path/to/file",
    "schedule.stages schedule.num_stages schedule.virtual_stages schedule.chunks":
        "schedule.stages_per_rank=2",
    "model.top_k": "model.experts_per_token=2",
    "model.bias": "model=class for another architecture",
    "model.weights model.checkpoint model.ckpt":
        "model=hf model.path=/models/my_llama, or trainer.resume=auto",
    "output.dir output.path checkpoint.dir checkpoint.path": "hydra.run.dir=FOLDER",
    "checkpoint.every checkpoint.interval": "trainer.checkpoint_every_n_steps=100",
    "tracking.mode wandb.mode wandb_mode wandb.offline": "tracking.offline=true",
    "data.shuffle data.drop_last data.pin_memory data.streaming data.cache_dir data.collate_fn "
    "data.sampler": "data=class data.path=my_pkg.data:LitData, whose loaders do as they like",
    "data.split data.val_split data.test_split data.validation_split": "data.val_fraction=0.1",
    "costs.fwd costs.f": "costs=uniform costs.forward=1",
    "costs.bwd costs.b": "costs=uniform costs.backward=2",
    "planner.gpu planner.device hardware.gpu hardware.type hardware.device": "hardware=a100_80g",
    "model.type model.size model.preset model.architecture": "model=llama2_7b, one of --help's",
    "data.batch": "data.microbatch_size=2",
    "planner.schedule planner.schedules": "schedule=1f1b, which pins it for the planner, too",
    # Ours once.
    "planner.partition": "planner.balance_ratio=1.2 for the fewest bytes, or without it",
    "cluster.host cluster.hosts cluster.hostfile cluster.ssh":
        "cluster=slurm, or cluster=torchrun, which is started on each host",
    "tracking.notes tracking.note": "user.note=TEXT, which trackers get, too",
    "tracking.run_name tracking.run tracking.id": "experiment_name=my_run",
    "zero_optimization.stage": "overlap=zero1",
    "foldx_mode fold_mode": "schedule=foldx_fifo or schedule=foldx_aiao",
    # Processes.
    "np ranks num_ranks devices gpus num_gpus ngpus num_devices num_device nproc nproc_per_node "
    "world_size num_processes ntasks n_gpus gpu_ids": _PROCESSES,
    "num_nodes nnodes num_machines nodes": "cluster.nodes=2",
    "host port main_process_port master_port master_addr main_process_ip rdzv_endpoint "
    "rdzv_backend rdzv_id node_rank machine_rank local_rank standalone": _TORCHRUN,
    "strategy accelerator_strategy parallelism": "schedule=, pp=, dp=, tp= and overlap=zero1",
    "pipeline pipeline_parallel pipeline_parallel_size pipeline_parallel_degree "
    "pipeline_model_parallel_size pp_size pp_degree num_stages n_stages stages pipeline_stages "
    "num_pipeline_stages": "pp=4",
    "virtual_stages virtual_pipeline_model_parallel_size num_layers_per_virtual_pipeline_stage vpp "
    "vpp_size num_model_chunks model_chunks interleave pipeline_parallel_layers_per_stage":
        "schedule=interleaved_1f1b schedule.stages_per_rank=2",
    "pipeline_parallel_schedule pipeline_schedule pp_schedule": "schedule=1f1b",
    "memory_per_device memory_per_gpu device_memory gpu_memory": "planner.memory_gb=40",
    "tensor_parallel tensor_parallel_size tensor_parallel_degree tensor_model_parallel_size "
    "tp_size tp_degree mp_size": "tp=2",
    "context_parallel context_parallel_size context_parallel_degree cp cp_size ulysses":
        "tp=2 sequence_parallel=true",
    "expert_parallel expert_parallel_size expert_parallel_degree expert_model_parallel_size "
    "ep_size": "ep=2",
    "expert_tensor_parallel expert_tensor_parallel_size expert_tensor_parallel_degree etp":
        "tp=2 expert_tp=true",
    "data_parallel data_parallel_size data_parallel_degree dp_size dp_degree replicas "
    "data_parallel_replicate_degree": "dp=2",
    "zero zero_stage zero_optimization fsdp deepspeed sharding_strategy distributed_optimizer "
    "use_distributed_optimizer data_parallel_shard_degree overlap_param_gather": "overlap=zero1",
    "overlap_grad_reduce overlap_comm bucket_cap_mb":
        "overlap=grad_reduce, with overlap.bucket_mb=25",
    "queue": "cluster=slurm cluster.partition=gpu",
    "reservation nodelist exclude dependency nice": _SBATCH,
    "cpus_per_task cpus ncpus": "cluster.cpus_per_task=8",
    "modules module_load prologue prolog pre_commands": "\"cluster.setup=['module load cuda']\"",
    "container container_image image singularity apptainer pyxis docker":
        "cluster.container.image=IMAGE",
    "container_mounts mounts binds": "\"cluster.container.mounts=['/data:/data:ro']\"",
    "array array_parallelism max_concurrent": "cluster.throttle=4",
    "time_limit walltime": "cluster.time=02:00:00",
    # Batches, and where they come from.
    "batch_size train_batch_size per_device_train_batch_size per_device_eval_batch_size":
        "data.global_batch_size=64 (sequences per step) or data.microbatch_size=2",
    "global_batch gbs": "data.global_batch_size=64",
    "micro_batch_size train_micro_batch_size_per_gpu mbs": "data.microbatch_size=2",
    "chunks num_chunks n_chunks micro_batches microbatches n_microbatches num_micro_batches "
    "pipeline_parallel_microbatches": "num_microbatches=8",
    "gradient_accumulation_steps grad_accum accumulation_steps accumulate gas":
        "trainer.accumulate_grad_batches=2, or num_microbatches=8 for more microbatches per step",
    "dataset dataset_path dataset_name data_path data_dir train_file train_data corpus":
        "data=text data.path=/path/to/file",
    "workers dataloader_num_workers": "data.num_workers=2",
    # The optimizer.
    "learning_rate base_lr max_lr": "optimizer.lr=3e-4",
    "decay_steps lr_decay_steps lr_decay_iters":
        "optimizer.schedule=cosine, which ends at trainer.max_steps",
    "min_learning_rate min_lr": "optimizer.min_lr_ratio=0.1",
    "warmup warmup_iters lr_warmup_steps lr_warmup_iters warmup_ratio warmup_fraction "
    "num_warmup_steps": "optimizer.warmup_steps=100",
    "lr_scheduler scheduler lr_scheduler_type lr_schedule lr_decay_style":
        "optimizer.schedule=cosine",
    "beta1 beta2 adam_beta1 adam_beta2": "optimizer.betas=[0.9,0.95]",
    "epsilon adam_epsilon": "optimizer.eps=1e-8",
    "wd": "optimizer.weight_decay=0.1",
    "grad_clip gradient_clip clip_grad max_grad_norm max_norm clip":
        "trainer.gradient_clip_val=1.0",
    # How long, how often, and what is kept.
    "steps max_iters train_iters num_steps training_steps max_train_steps":
        "trainer.max_steps=1000",
    "epochs num_epochs num_train_epochs": "trainer.max_epochs=3",
    "eval_steps eval_interval eval_every val_every val_interval val_freq evaluation_strategy "
    "eval_strategy validation_interval": "trainer.val_check_interval=30",
    "eval_iters eval_batches num_eval_batches": "trainer.limit_val_batches=8",
    "logging_steps log_every log_interval log_freq logging_interval":
        "trainer.log_every_n_steps=10",
    "save_steps save_interval save_every save_freq checkpoint_interval checkpoint_every ckpt_freq "
    "checkpoint_freq every_n_train_steps enable_checkpointing checkpointing":
        "trainer.checkpoint_every_n_steps=100",
    "save_total_limit max_checkpoints keep_checkpoints": "trainer.keep_last=3",
    "save_top_k load_best_model_at_end save_best": "trainer.keep_best=1",
    "early_stopping early_stopping_patience patience": _STOPPING,
    "callbacks callback": _STOPPING,
    "config config_file config_path config_name":
        "--config-dir DIR experiment=NAME with DIR/experiment/NAME.yaml",
    "fast_dev_run dry_run": "trainer.max_steps=1, or mode=validate",
    "overfit_batches": "trainer.limit_train_batches=1",
    "auto_lr_find lr_find": "-m sweep.trials=20 optimizer.lr='interval(1e-4,1e-2)'",
    "profiler profile_steps": "mode=profile, or any run's trace.json",
    "resume continue restore load resume_training ckpt ckpt_path resume_from_checkpoint "
    "resume_from load_checkpoint": "trainer.resume=auto, or a checkpoint's folder",
    "seed_everything random_seed": "seed=1",
    # The model.
    "num_layers n_layer n_layers depth num_hidden_layers": "model.layers=8",
    "hidden_size d_model n_embd hidden_dim embed_dim dim width": "model.hidden=256",
    "num_heads n_head n_heads num_attention_heads": "model.heads=8",
    "gqa num_key_value_heads n_kv_heads num_kv_heads num_query_groups": "model.kv_heads=2",
    "intermediate_size ffn_dim d_ff mlp_dim ffn_hidden_size n_inner": "model.ffn=1024",
    "vocab_size padded_vocab_size": "model.vocab=256",
    "seq_len seq_length sequence_length block_size context_length max_seq_len n_ctx n_positions "
    "max_position_embeddings max_length": "model.sequence=1024",
    "num_experts n_experts moe num_local_experts n_routed_experts": "model.experts=8",
    "moe_router_topk num_experts_per_tok topk": "model.experts_per_token=2",
    "hidden_act activation_function": "model.activation=gelu",
    "rope position_embedding_type rotary": "model.position=rope",
    "tie tie_weights tie_word_embeddings": "model.tie_embeddings=true",
    "pretrained_model_name_or_path model_name_or_path pretrained_model":
        "model=hf model.path=/models/my_llama",
    "class cls entry module target class_path import_path": _OWN_CLASS,
    "gradient_checkpointing gradient_checkpointing_enable activation_checkpointing "
    "activation_checkpoint checkpoint_activations recompute_granularity recompute_method "
    "recompute_activations recompute_num_layers": "recompute=full",
    # Numbers, and what is printed.
    "cuda device use_cuda use_gpu": "trainer.accelerator=gpu",
    "fp16 use_fp16 half": "trainer.precision=16-mixed",
    "amp amp_level bf16 use_bf16 bfloat16 dtype torch_dtype mixed_precision autocast param_dtype":
        "trainer.precision=bf16-mixed",
    "tf32 allow_tf32": "trainer.float32_matmul_precision=high",
    "torch_compile": "compile=true",
    "log logger loggers tracker trackers report_to log_with":
        "tracking=csv, wandb, tensorboard or none",
    "wandb": "tracking=wandb",
    "tensorboard": "tracking=tensorboard",
    "verbose debug log_level logging loglevel": "--verbose, or the logs in the run's folder",
    "name run_name job_name exp_name wandb_run_name run_id": "experiment_name=my_run",
    "out output o output_dir save_dir log_dir run_dir default_root_dir out_dir":
        "hydra.run.dir=FOLDER",
    "eval test evaluate do_eval do_test": "mode=eval",
    "train do_train fit": "mode=train",
    "predict do_predict inference": "mode=predict",
    "prompt": "mode=generate generate.prompt=TEXT",
}  # fmt: skip
_MEANT_OPTIONS = {
    "cluster": {
        "kubernetes": "torchrun", "k8s": "torchrun", "ray": "torchrun", "sbatch": "slurm",
        "srun": "slurm", "multiprocessing": "local", "spawn": "local",
    },
    "costs": {"measured": "profiled", "profile": "profiled", "datasheet": "analytic"},
    "data": {"wikitext": "text", "stream": "class", "hf": "class", "bin": "tokens"},
    "overlap": {
        "false": "none", "off": "none", "no": "none", "true": "grad_reduce", "ddp": "grad_reduce",
        "fsdp": "zero1", "zero": "zero1", "zero2": "zero1", "zero3": "zero1",
        "distributed_optimizer": "zero1",
    },
    "recompute": {
        "true": "full", "on": "full", "checkpoint": "full", "everything": "full", "all": "full",
        "uniform": "full", "block": "layer", "false": "none", "off": "none", "no": "none",
    },
    "optimizer": {
        **{
            name.lower(): f"class optimizer.path=torch.optim:{name}"
            for name in (
                "Adadelta", "Adafactor", "Adagrad", "Adamax", "ASGD", "NAdam", "RAdam", "RMSprop",
                "Rprop",
            )
        },
        "lion": "class optimizer.path=lion_pytorch:Lion, of pip install lion-pytorch",
        **{
            name.lower(): f"class optimizer.path=bitsandbytes.optim:{name}, of pip install "
            "bitsandbytes" for name in ("Adam8bit", "AdamW8bit", "Lion8bit", "PagedAdamW8bit")
        },
    },
    "tracking": {
        "tb": "tensorboard", "false": "none", "null": "none", "w&b": "wandb", "true": "wandb",
    },
}  # fmt: skip
_MEANT_VALUES = {
    # Lightning's own short names, and what others call the same.
    "mode": {
        "fit": "train", "training": "train", "test": "eval", "evaluate": "eval", "val": "eval",
        "sample": "generate", "infer": "predict", "inference": "predict", "sim": "simulate",
        "dry_run": "validate",
    },
    "trainer.precision": {
        "bf16": "bf16-mixed", "16": "16-mixed", "32": "32-true", "64": "64-true",
        "fp16": "16-mixed", "fp32": "32-true", "fp64": "64-true", "bfloat16": "bf16-mixed",
        "half": "16-mixed", "float32": "32-true", "float16": "16-mixed", "float64": "64-true",
        "double": "64-true", "tf32": "32-true trainer.float32_matmul_precision=high",
        "fp8": "bf16-mixed",
    },
    "trainer.max_steps": dict.fromkeys(
        ("inf", "infinity", "none", "null", "unlimited", "never"), "-1 trainer.max_epochs=1"
    ),
    "trainer.limit_val_batches": {"off": "0", "never": "0", "no": "0", "false": "0"},
    "trainer.accelerator": {"cuda": "gpu", "nvidia": "gpu", "mps": "cpu", "tpu": "cpu"},
    "trainer.float32_matmul_precision": {"tf32": "high"},
    "trainer.on_nan": {"raise": "stop", "error": "stop", "true": "stop", "false": "ignore"},
    "compile": {"max-autotune": "true", "reduce-overhead": "true", "default": "true"},
}  # fmt: skip
_SWITCH = {
    "true": "true", "false": "false",
    "yes": "true", "y": "true", "on": "true", "1": "true", "t": "true", "enable": "true",
    "enabled": "true", "no": "false", "n": "false", "off": "false", "0": "false", "f": "false",
    "none": "false", "disable": "false", "disabled": "false",
}  # fmt: skip
_WITH_UNIT = re.compile(
    r"([+-]?(?:\d[\d_,]*(?:\.\d+)?|\.\d+)(?:[eE][+-]?\d+)?)\s*([A-Za-z%]+)(?:/s(?:ec)?)?"
)
_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d{1,3})?")
_DECIMAL = {"k": 1e3, "m": 1e6, "g": 1e9, "b": 1e9, "t": 1e12, "p": 1e15}
_TIMES = {
    "us": 1e-6, "ms": 1e-3, "s": 1.0, "sec": 1.0, "secs": 1.0, "second": 1.0, "seconds": 1.0,
    "m": 60.0, "min": 60.0, "mins": 60.0, "minute": 60.0, "minutes": 60.0, "h": 3600.0,
    "hr": 3600.0, "hour": 3600.0, "hours": 3600.0, "d": 86400.0, "day": 86400.0, "days": 86400.0,
}  # fmt: skip


# Dashes, quotes, blanks and digits of typography, which pages and chats put in for the keyboard's.
_LETTERS = str.maketrans({
    **dict.fromkeys("\u2010\u2011\u2012\u2013\u2014\u2015\u2212\ufe63\uff0d", "-"),
    **dict.fromkeys("\u201c\u201d\u201e\u00ab\u00bb", '"'),
    **dict.fromkeys("\u2018\u2019\u201a\u2032", "'"),
    **dict.fromkeys("\u00a0\u2007\u2009\u202f\u3000", " "),
    **dict.fromkeys("\u200b\u200c\u200d\u2060\ufeff", ""),
    **{chr(0xFF01 + i): chr(0x21 + i) for i in range(94)},
})  # fmt: skip


def plain_letters(text: str) -> str:
    """The text as a keyboard would have it.

    >>> plain_letters("\u2013m \u201cpp=\uff12\u201d")
    '-m "pp=2"'
    """
    return text.translate(_LETTERS)


def meant_key(path: str, value: str = "") -> str:
    """`` Try ...`` for a key that others have; empty for one that nobody has.

    ``value``: for the words that have it in their names.
    """
    plain = path.lower().replace("-", "_")
    name, said = plain.rpartition(".")[2], value.strip().lower()
    if (name, said) in _MEANT_WORDS:
        return f" Try {_MEANT_WORDS[name, said]}."
    for wanted in (plain, name):
        for names, ours in MEANT_KEYS.items():
            if wanted in names.split():
                return f" Try {ours.format(name=name)}."
    return ""


# Other keys whose value means another thing there: a rate and not its share, all and not per rank.
OTHER_SCALES = (
    "min_lr", "min_learning_rate", "data.split", "data.test_split", "schedule.stages",
    "schedule.num_stages", "schedule.virtual_stages", "schedule.chunks",
)  # fmt: skip
_TRACKERS = ("csv", "none", "tensorboard", "wandb")
_MEANT_WORDS = {
    **{(name, mode): f"schedule=foldx_{mode}" for name in ("foldx_mode", "fold_mode")
       for mode in ("fifo", "aiao")},
    **{(name, said): "tracking=csv" for name in ("wandb", "tensorboard")
       for said in ("false", "disabled", "off", "no", "0", "none", "null")},
    ("wandb", "offline"): "tracking=wandb tracking.offline=true",
    ("wandb", "dryrun"): "tracking=wandb tracking.offline=true",
    **{(name, said): f"tracking={said}" for said in _TRACKERS
       for name in ["log", "logger", "loggers", "tracker", "trackers", "report_to", "log_with"]},
    ("strategy", "ddp"): "dp=2, the number of replicas",
    ("strategy", "fsdp"): "dp=2 overlap=zero1, which shards the optimizer",
}  # fmt: skip


def meant_option(group: str, option: str) -> str | None:
    """The option of ours that another's name stands for."""
    return _MEANT_OPTIONS.get(group, {}).get(option.strip().lower())


def meant_value(path: str, value: object, *, switch: bool, whole: bool, number: bool) -> str | None:
    """What a value that a key does not take was to say; None if that cannot be seen.

    ``switch``, ``whole``, ``number``: whether the key takes true and false, or such a number.
    """
    if isinstance(value, str):
        value = plain_letters(value)
    plain = str(value).strip().lower()
    found = _MEANT_VALUES.get(path, {}).get(plain)
    if found is None and switch:
        found = _SWITCH.get(plain)
    if found is None and number and isinstance(value, str):
        found = _measured(path, value.strip(), whole=whole)
    return found


def _measured(path: str, value: str, *, whole: bool) -> str | None:
    """A number with its unit in the unit that the key's name says.

    >>> _measured("hardware.memory_gb", "80GiB", whole=False)
    '80'
    >>> _measured("trainer.max_steps", "10k", whole=True)
    '10000'
    """
    if _NUMBER.fullmatch(value) and not (whole and float(value) % 1):
        return re.sub(r"^([+-]?)0+(?=\d)", r"\1", value)  # in quotes, which a file keeps; 02
    if whole and re.fullmatch(r"\d{1,3}(,\d{3})+", value):
        return value.replace(",", "")
    if not whole and re.fullmatch(r"0,\d+", value):
        return value.replace(",", ".")
    if quotient := re.fullmatch(r"(\d+(?:\.\d+)?)\s*/\s*([1-9]\d*)", value):
        result = float(quotient[1]) / float(quotient[2])
        return None if whole and result % 1 else f"{result:.12g}"
    if power := re.fullmatch(r"10(?:\^|\*\*)(-?\d{1,2})", value):
        return None if whole and int(power[1]) < 0 else f"{10.0 ** int(power[1]):.12g}"
    found = _WITH_UNIT.fullmatch(value)
    if found is None:
        return None
    amount, unit = float(found[1].replace(",", "").replace("_", "")), found[2]
    bits = re.fullmatch(r"([kKMGT]?)(b|bits?|bps)", unit) if "_bandwidth" in path else None
    factor = _factor(path, f"{bits[1]}b".lower() if bits else unit.lower())
    if factor is None or not math.isfinite(amount * factor):
        return None
    result = amount * factor / (8 if bits else 1)
    if unit == "%" and whole:
        return None  # a share of what?
    return str(round(result)) if whole else f"{result:.12g}".replace("e+", "e")


def _factor(path: str, unit: str) -> float | None:
    if unit == "%":
        return 0.01
    if path.endswith(("_s", "_minutes")):
        seconds = _TIMES.get(unit)
        return seconds and (seconds / 60 if path.endswith("_minutes") else seconds)
    bare = unit.removesuffix("bytes").removesuffix("flops").removesuffix("flop/s")
    bare = bare.removesuffix("ib") or unit
    size = _DECIMAL.get(bare) or _DECIMAL.get(bare.removesuffix("b"))
    for ending, own in (("_gb", 1e9), ("_mb", 1e6)):
        if path.endswith(ending):
            return size and size / own
    return size if size else 1.0
