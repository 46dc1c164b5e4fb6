"""Pictures and files of a step: every one takes a Timeline, predicted or measured alike."""
