"""From compute to communication: messages between ranks and the life of their buffers."""
