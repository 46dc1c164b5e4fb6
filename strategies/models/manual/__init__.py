"""Steps that run their own backwards: cut into segments, each a pass of the program."""
