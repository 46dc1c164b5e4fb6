"""An order in another framework's words, as one in torch's notation."""

from strategies.referee.foreign.megatron_flags import layout_stages, read_flags
from strategies.referee.foreign.their_order import Asked, Theirs, read_their_file

__all__ = ["Asked", "Theirs", "layout_stages", "read_flags", "read_their_file"]
