"""Tensors of a checkpoint on disk: torch.distributed.checkpoint over hashed safetensors files."""
