"""What people's hooks see of a module of which each rank has a part."""
