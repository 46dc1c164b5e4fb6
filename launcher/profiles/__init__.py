"""What was measured: hardware files from profiles, and whether a profile fits a request."""
