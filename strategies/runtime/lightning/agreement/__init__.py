"""What do all ranks have to begin with alike: the module's values, buffers, random numbers?"""
