"""Linear layers with groups of weights under one scale, multiplied as integers by C kernels."""
