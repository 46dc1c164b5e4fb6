"""How weights change at the flush: gradients reduced, agreed, applied."""
