"""One module per mode, each with ``run(config, run_dir) -> exit code``."""
