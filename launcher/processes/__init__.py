"""How ranks are started, watched and ended."""
