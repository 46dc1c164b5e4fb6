"""Causal language models of the Hugging Face transformers library, cut by their own layers."""
