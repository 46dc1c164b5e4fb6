"""Cutting an ordinary LightningModule into stages: replay of the user's step with holes."""
